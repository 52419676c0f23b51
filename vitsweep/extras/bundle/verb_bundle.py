"""`vitsweep bundle`: a sweep as one archive that another laboratory can check."""

from collections.abc import Sequence
from pathlib import Path

from vitsweep.cli import VERBS, Options, require_writable
from vitsweep.errors import BadValueError, ExitCode, VitsweepError
from vitsweep.extras.bundle.archive import write_bundle
from vitsweep.results.sweeps import find_sweep
from vitsweep.tables.formatting import count

HELP = """\
Write a sweep as one archive: cells, records with the times of all steps, tables, the commit and diff of
the code, checksums, and claims. A claim is a speedup over the baseline with its interval and a margin:
`vitsweep reproduce` measures it again on another machine.

  python -m vitsweep bundle first --to first.tar.gz
"""


def add_options(options: Options) -> None:
    """Add what may follow the verb."""
    options.add_sweep()
    options.add_argument(
        "--to", type=Path, metavar="FILE", help="archive to write (SWEEP.tar.gz, here)"
    )


def run(arguments: Sequence[str]) -> int:
    """Write the archive.

    Raises:
        VitsweepError: there is no such sweep, or nothing was measured.
    """
    typed = VERBS["bundle"].read(arguments)
    store = find_sweep(typed.sweep)
    to = typed.to or Path(f"{store.name}.tar.gz")
    require_writable("--to", to)
    if to.exists():
        raise BadValueError(f"`{to}` exists: choose another with `--to`, or remove it.")
    if store.is_locked():
        raise VitsweepError(f"A command is measuring in `{store.root}`: wait until it has ended.")
    claims, left = write_bundle(store, to)
    print(f"Wrote {to} with {count(len(claims), 'claim')} ({to.stat().st_size / 2**20:.1f} MiB).")
    for note in left:
        print(f"  {note}")
    if not claims:
        print("No claim: no interval lies within a factor of two. Try `measurement.blocks=5`.")
    return ExitCode.ok
