"""`vitsweep reproduce`: the claims of a bundle, checked and measured again."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from vitsweep.cli import VERBS, Options
from vitsweep.console import open_console, print_lines
from vitsweep.errors import BadValueError, ExitCode, VitsweepError
from vitsweep.extras.bundle.archive import checksum_faults, extract
from vitsweep.extras.bundle.claims import Claim, Verdict, check
from vitsweep.extras.bundle.reproduce import (
    Reproduction,
    as_table,
    reproduce,
    require_own_or_trusted,
)
from vitsweep.report.views import collect
from vitsweep.results.store import Store
from vitsweep.tables.formatting import count
from vitsweep.tables.render import TextTable

DEFAULT_MINUTES = 60.0
HELP = """\
Check a bundle, then measure its claims on this machine.

The check compares all files with their checksums and the claims with those that the records make; it runs
nothing of the bundle, and with --check that is all. Then the cells of each claim and their baseline run in
turns, in fresh processes and blocks. A claim is *reproduced* if the new 95 % interval lies within its
margin, *not reproduced* if it lies wholly outside, else *too noisy to say*. Free text in cells of somebody
else (functions, folders) is listed and needs --trust. No code and no package of the bundle is used.

Exit codes: 0 all claims reproduced (with --check: nothing is wrong), 1 the check found a fault or a claim
is not reproduced, 2 no bundle, 3 a claim was not measured, 4 a claim is too noisy.

  python -m vitsweep reproduce first.tar.gz --check
  python -m vitsweep reproduce first.tar.gz --minutes 120
"""
CODES = {
    Verdict.not_reproduced: ExitCode.gate_failed,
    Verdict.not_measured: ExitCode.not_all_measured,
    Verdict.too_noisy: ExitCode.gate_undecided,
}
"""Verdict -> exit code, the first that occurs."""


def add_options(options: Options) -> None:
    """Add what may follow the verb."""
    options.add_argument("bundle", type=Path, metavar="BUNDLE", help="what `vitsweep bundle` wrote")
    options.flag("--check", help="run nothing")
    options.number(
        "--minutes",
        DEFAULT_MINUTES,
        "budget of this command, for all claims together (default %(default)g)",
    )


def run(arguments: Sequence[str]) -> int:
    """Check a bundle and measure its claims; return the exit code that the help names.

    Raises:
        VitsweepError: the file is no bundle, an entry of it is refused, or `--trust` is needed.
    """
    typed = VERBS["reproduce"].read(arguments)
    if not typed.bundle.is_file():
        raise BadValueError(f"`{typed.bundle}` is no file: name an archive of `vitsweep bundle`.")
    with TemporaryDirectory() as place:
        store = Store(extract(typed.bundle, Path(place).resolve()))
        wrong = checksum_faults(store.root)
        claims, faults = check(store)
        said = [f"  WRONG: {fault}" for fault in (*wrong, *faults)]
        made = count(len(claims), "claim")
        good = f"  ok: every file has its listed checksum, and the records make the {made}."
        print_lines(open_console(), said or [good])
        if said or typed.check:
            return ExitCode.gate_failed if said else ExitCode.ok
        return _measured(store, claims, typed.bundle, typed.minutes)


def _measured(store: Store, claims: Sequence[Claim], bundle: Path, minutes: float) -> int:
    if not claims:
        raise VitsweepError(f"`{bundle}` claims nothing: there is nothing to measure.")
    console = open_console()
    require_own_or_trusted(store, claims, bundle)

    def ended(one: Reproduction) -> None:
        print_lines(console, [f"{one.claim.cell}: {one.verdict}. {one.note}".rstrip()])

    rows, folder = reproduce(store, claims, minutes, open_console(stderr=True), ended)
    console.print(TextTable(as_table(rows)))
    if folder is not None:
        collect(Store(folder))
        print_lines(console, [f"The runs are in {folder}."])
    verdicts = {row.verdict for row in rows}
    return next((code for verdict, code in CODES.items() if verdict in verdicts), ExitCode.ok)
