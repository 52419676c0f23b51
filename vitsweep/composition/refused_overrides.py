"""Overrides that nothing would read are refused, from the command line and from Python."""

from collections.abc import Sequence
from pathlib import Path

from vitsweep.composition.conf_dir import named_sweeps
from vitsweep.composition.suggestions import unknown_choice
from vitsweep.errors import BadValueError

FOLDERS = ("hydra.run", "hydra.sweep", "hydra.output_subdir", "hydra.job.chdir")
"""Settings of Hydra's output folders: vitsweep has none of them."""
UNREAD = ("hydra.job", "hydra.runtime")
"""What Hydra fills in about a job, or would do to its process: cells run in processes of their own."""
OF_HYDRAS_OWN_OUTPUT = (
    "hydra.verbose", "hydra.help", "hydra/help", "hydra.hydra_help", "hydra/hydra_help",
    "hydra.job_logging", "hydra/job_logging", "hydra.hydra_logging", "hydra/hydra_logging",
    "hydra.output", "hydra/output", "hydra.callbacks", "hydra/callbacks", "hydra.mode",
)  # fmt: skip
"""Settings of Hydra's logs, help and callbacks: vitsweep prints its own."""
LOCAL_SETTINGS = ("parallel", "objective")
"""What `hydra.launcher` has where no launcher is chosen."""
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
        if _is_below(key.lstrip("~"), OF_HYDRAS_OWN_OUTPUT):
            raise BadValueError(
                f"`{override}` would change nothing: vitsweep prints its own progress and help, and "
                "calls no callbacks. Leave it out."
            )
        _refuse_settings_of_what_is_not_chosen(override, key, overrides)
        if key == "hydra.searchpath":
            _require_folders(override, name)
        if _is_below(key.lstrip("~"), UNREAD) and not (has_stock and _is_below(key, ENVIRONMENT)):
            raise BadValueError(
                f"`{override}` would change nothing: cells run in processes of their own, and no setting "
                "of Hydra's job reaches them. Leave it out; variables of the environment stand in "
                "front of the command (`NAME=value python -m vitsweep ...`)."
            )


def _refuse_settings_of_what_is_not_chosen(
    override: str, key: str, overrides: Sequence[str]
) -> None:
    """Refuse a setting of a launcher or sweeper that the command does not choose."""
    part, _, setting = key.lstrip("~").removeprefix("hydra.").partition(".")
    if not (key.startswith("hydra.") and setting and part in ("launcher", "sweeper")):
        return
    if any(text.lstrip("+").startswith(f"hydra/{part}") for text in overrides):
        return
    if part == "launcher" and setting not in LOCAL_SETTINGS:
        raise BadValueError(
            f"`{override}`: the launcher of this machine has no such setting, only "
            f"{' and '.join(f'`hydra.launcher.{name}`' for name in LOCAL_SETTINGS)}. Those of a cluster "
            "need `hydra/launcher=slurm` beside them."
        )
    if part == "sweeper" and setting != "plan_only":
        raise BadValueError(
            f"`{override}` is a setting of an optimizing sweeper: add `hydra/sweeper=optuna`, or leave "
            "it out."
        )


def _require_folders(override: str, value: str) -> None:
    """Refuse a search path with a folder that does not exist."""
    for path in value.strip("[]").split(","):
        folder = path.strip().strip("'\"").removeprefix("file://")
        if folder and not folder.startswith("pkg:") and not Path(folder).is_dir():
            raise BadValueError(
                f"`{override}`: `{folder}` is no folder: name one that exists, such as "
                "`'hydra.searchpath=[file:///home/me/my_conf]'`, or use `--config-dir`."
            )


def _is_below(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)
