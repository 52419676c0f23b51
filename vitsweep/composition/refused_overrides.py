"""Overrides that nothing would read are refused, from the command line and from Python."""

from collections.abc import Sequence

from vitsweep.composition.conf_dir import named_sweeps
from vitsweep.composition.suggestions import unknown_choice
from vitsweep.errors import BadValueError

FOLDERS = ("hydra.run", "hydra.sweep", "hydra.output_subdir", "hydra.job.chdir")
"""Settings of Hydra's output folders: vitsweep has none of them."""
UNREAD = ("hydra.job", "hydra.runtime")
"""What Hydra fills in about a job, or would do to its process: cells run in processes of their own."""
ENVIRONMENT = ("hydra.job.env_set", "hydra.job.env_copy")
STOCK_LAUNCHERS = ("hydra/launcher=basic", "hydra/launcher=joblib", "hydra/launcher=submitit")
"""Hydra's own launchers do set the variables of `ENVIRONMENT` for their jobs."""


def refuse_ignored(overrides: Sequence[str], has_own_conf: bool) -> None:
    """Refuse settings that nothing reads, and a named sweep that does not exist or is typed as a value.

    Raises:
        BadValueError: there is one; the text says what to type instead.
    """
    has_stock = any(o.startswith(STOCK_LAUNCHERS) for o in overrides)
    for override in overrides:
        key, _, name = override.lstrip("+").partition("=")
        if key == "sweep" and not (override.startswith("+") and name.isidentifier()):
            raise BadValueError(
                f"`{override}`: `sweep` is a section of settings; a named sweep is `+sweep=NAME`, "
                "and `python -m vitsweep --help` lists them."
            )
        if key == "sweep" and has_own_conf and name not in (names := named_sweeps()):
            raise unknown_choice("+sweep", name, names)
        if _is_below(key.lstrip("~"), FOLDERS):
            raise BadValueError(
                f"`{override}` would change nothing: results go to the folder "
                "`sweep.folder`/`sweep.name`; set those instead."
            )
        if _is_below(key.lstrip("~"), UNREAD) and not (has_stock and _is_below(key, ENVIRONMENT)):
            raise BadValueError(
                f"`{override}` would change nothing: cells run in processes of their own, and no setting "
                "of Hydra's job reaches them. Leave it out; variables of the environment stand in "
                "front of the command (`NAME=value python -m vitsweep ...`)."
            )


def _is_below(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)
