"""The error of a command of which no cell can run."""

from vitsweep.errors import ImpossibleCellError
from vitsweep.planning.sweep_plan import SweepPlan, cell_settings
from vitsweep.tables.reasons import reason_lines


def all_refused(plan: SweepPlan) -> ImpossibleCellError:
    """Return the error that names each reason with the cells that it is about."""
    every = plan.entries.values()
    reasons = [reason for entry in every for reason in entry.reasons]
    if len(every) == 1:
        return ImpossibleCellError(reasons)
    settings = cell_settings(plan)
    together = [" ".join(entry.reasons) for entry in every]
    return ImpossibleCellError(reasons, reason_lines([settings[c] for c in plan.entries], together))
