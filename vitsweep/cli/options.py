"""Options of the verbs: argparse whose complaints are sentences like all others."""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any, NoReturn

from vitsweep.errors import VitsweepError


class Options(ArgumentParser):
    """Parser of one verb.

    Args:
        verb: as typed after `python -m vitsweep`.
        description: what it does, for `--help`.
        fields: of `ArgumentParser`.
    """

    def __init__(self, verb: str, description: str, **fields: Any) -> None:
        super().__init__(
            prog=f"python -m vitsweep {verb}",
            description=description,
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **fields,
        )

    @property
    def flags(self) -> list[str]:
        """Every option as typed, `--help` among them."""
        return list(self._option_string_actions)

    def add_sweep(self) -> None:
        """Let a sweep be named, once, as the verb's first word."""
        self.add_argument(
            "sweep",
            nargs="?",
            default="default",
            metavar="SWEEP",
            help="name under results/ or folder (%(default)s)",
        )

    def error(self, message: str) -> NoReturn:
        """Refuse what was typed.

        Raises:
            VitsweepError: always; the text names what is wrong, and how the verb is typed.
        """
        raise VitsweepError(f"{message[:1].upper()}{message[1:]}.\n{self.format_usage().strip()}")
