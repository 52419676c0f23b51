"""The command without a verb: cells that are typed are measured."""

from collections.abc import Sequence

from vitsweep.api.session import NotOursError
from vitsweep.cli.cells import finish, read_line


def measure_cells(arguments: Sequence[str]) -> int:
    """Measure what is missing of the cells that are typed, and show all; one cell is a sweep of one.

    Returns:
        0, or 3 where cells were not measured.

    Raises:
        VitsweepError: what was typed is wrong.
        SweepStopped: the user stopped it.
    """
    line = read_line(arguments)
    if not line.of_hydra:
        try:
            return finish(line.session())
        except NotOursError:
            pass
    from vitsweep.cli.hydra_detour import run_hydra  # Hydra

    return run_hydra(arguments)
