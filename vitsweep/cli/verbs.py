"""The verbs of the command line: the one table that help, completion and documentation follow."""

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class Verb:
    """One verb.

    The module `vitsweep.cli.<name>` has `parser() -> Options` and `run(arguments) -> int`, which
    returns the exit code. It is imported only when the verb is typed, helped with or completed.

    Attributes:
        name: as typed after `python -m vitsweep`.
        usage: what may follow the name.
        summary: what it does, in one line.
        names_a_sweep: whether its first word may be a sweep, for completion.
    """

    name: str
    usage: str
    summary: str
    names_a_sweep: bool = True

    def parser(self) -> ArgumentParser:
        """Return the parser of what follows the verb."""
        parser: ArgumentParser = import_module(f"vitsweep.cli.{self.name}").parser()
        return parser

    def run(self, arguments: Sequence[str]) -> int:
        """Do what was typed after the verb; return the exit code."""
        return int(import_module(f"vitsweep.cli.{self.name}").run(arguments))


_ALL = (
    Verb("plan", "-m [override ...] [--hardware|--nodes|--columns A,B] [--parquet|--html FILE] "
         "[--no-predict] [--search layouts]",
         "list cells with state and predictions; runs nothing",
         names_a_sweep=False),
    Verb("status", "[SWEEP] [--watch] | --all",
         "show jobs and cells of a submitted sweep, or list all sweeps"),
    Verb("collect", "[SWEEP] [--rows N|all] [--where CONDITION] [--sort COLUMN] [--columns A,B] "
         "[--sync] [--reconcile]",
         "write parquet and CSV files anew, show the table; upload W&B runs"),
    Verb("report", "[SWEEP [OTHER]]", "write one HTML page of a sweep, or of two compared"),
    Verb("retry", "[SWEEP] [--status failed,timed_out] [--set override ...]",
         "run cells again that were not measured"),
    Verb("cancel", "[SWEEP]", "end the jobs of a sweep; what was measured is kept"),
    Verb("compare", "A B [override ...] [--width 0.05] [--minutes 30] [--mixed-hardware]",
         "measure two settings in turns until the interval on their ratio is narrow", names_a_sweep=False),
    Verb("gate", "[SWEEP] --against KEPT [--tolerance 0.05] [--metric A,B] [--lenient] [--mixed-hardware]",
         "compare with a kept baseline; exit code 1 if a cell became worse"),
    Verb("check", "FOLDER", "test the choices of a configuration folder of your own, proofs included",
         names_a_sweep=False),
    Verb("doctor", "[--calibrate]", "say what this machine can do, what is missing, and how to get it",
         names_a_sweep=False),
)  # fmt: skip

VERBS: dict[str, Verb] = {verb.name: verb for verb in _ALL}
