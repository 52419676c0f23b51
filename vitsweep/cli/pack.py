"""`vitsweep pack`: the files of a sweep's cells in one file, for file systems that count them."""

from collections.abc import Sequence

from vitsweep.cli.verbs import VERBS, Options
from vitsweep.errors import VitsweepError
from vitsweep.launchers.few_files import pack_ended
from vitsweep.results import pack
from vitsweep.results.sweeps import find_sweep
from vitsweep.tables.formatting import count


def add_options(options: Options) -> None:
    """Add what may follow the verb."""
    options.add_sweep()


def run(arguments: Sequence[str]) -> int:
    """Pack all cells but those that jobs still measure; return 0.

    Raises:
        VitsweepError: a command is at work in the sweep, or the pack cannot be written.
    """
    typed = VERBS["pack"].read(arguments)
    store = find_sweep(typed.sweep)

    def refuse() -> None:
        raise VitsweepError(f"A command is at work in `{store.root}`: pack it when that has ended.")

    with store.lock(refuse):
        try:
            moved, num_left = pack_ended(store)
        except OSError as error:
            raise VitsweepError(
                f"`{store.cells / pack.FILE}` cannot be written ({error.strerror}): what was not packed "
                "stays as it is."
            ) from error
    left = (
        f" {count(num_left, 'cell')} of waiting and running jobs stayed as they are."
        if num_left
        else ""
    )
    print(f"{count(moved, 'file')} moved into `{store.cells / pack.FILE}`.{left}")
    return 0
