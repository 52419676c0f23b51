"""`vitsweep doctor --calibrate`: measure this machine, so that `plan` predicts its step times."""

import os
import time
from collections.abc import Sequence

from pandas import DataFrame
from rich.console import Console
from rich.table import Table

from vitsweep.composition.composer import Composer
from vitsweep.errors import ExitCode
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.predict.calibrate import SHORT_TRAININGS, calibrate_machine
from vitsweep.predict.step_trace import StepTrace
from vitsweep.predict.trace_pool import trace_cells
from vitsweep.rates.calibration import Calibration, RankSetup
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.resources import Machine
from vitsweep.tables.render import as_table

BUSY = 0.5
"""Load per core above which other work on the machine disturbs the measurement."""


def calibrate(console: Console) -> int:
    """Measure, save and print the rates of this machine; return the exit code."""
    machine = Machine.here()
    started = time.monotonic()
    load = os.getloadavg()[0] / machine.cores_per_node
    if load > BUSY:
        console.print(
            f"The load is {load:.1f} per core: other work disturbs this measurement. Repeat it when the "
            "machine is idle.",
            style="yellow",
        )
    composer = Composer()

    def cells_for(ranks: int) -> list[CellSpec]:
        shared = [f"resources.ranks_per_node={ranks}", "measurement=smoke"]
        return [plan_cell(composer.compose([*o, *shared]), machine).spec for o in SHORT_TRAININGS]

    most = machine.devices_per_node or machine.cores_per_node
    counts = sorted({1, min(2, most), most} if machine.device == "cpu" else {1, most})
    try:
        found = calibrate_machine(
            cells_for, _traces, counts[:2], lambda text: console.print(f"measuring {text}")
        )
    except RuntimeError as error:
        console.print(str(error), highlight=False, markup=False)
        return ExitCode.not_all_measured
    path = found.save()
    console.print(_summary(found))
    console.print(
        f"Saved as {path} after {time.monotonic() - started:.0f} s: `python -m vitsweep plan` uses it on "
        f"{found.device} with torch {found.torch}.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return ExitCode.ok


def _traces(cells: Sequence[CellSpec]) -> list[StepTrace]:
    traces = trace_cells({str(number): cell for number, cell in enumerate(cells)})
    found = [traces[str(number)] for number in range(len(cells))]
    if failed := [trace for trace in found if isinstance(trace, str)]:
        raise RuntimeError(f"A short training could not be traced: {failed[0]}")
    return [trace for trace in found if isinstance(trace, StepTrace)]


def _summary(calibration: Calibration) -> Table:
    rows = [_setup(setup) for setup in calibration.setups]
    return as_table(DataFrame(rows), f"{calibration.device}, {calibration.date}")


def _setup(setup: RankSetup) -> dict[str, str]:
    rates = {
        dtype: max(
            2e-3 * row["shape"][1] * row["shape"][2] * row["shape"][3] / row["us"]
            for row in setup.operators
            if row["kind"] == "matmul" and row["dtype"] == dtype
        )
        for dtype in ("float32", "bfloat16")
    }
    copies = [r for r in setup.operators if r["name"] == "copy_" and r["dtype"] == "float32"]
    largest = max(copies, key=lambda row: row["bytes_moved"])
    reduced = [r for r in setup.collectives if r["name"] == "all_reduce" and r["bytes"] == 1 << 24]
    return {
        "ranks x threads": f"{setup.ranks} x {setup.threads}",
        "matmul GFLOP/s fp32": f"{rates['float32']:.0f}",
        "bf16": f"{rates['bfloat16']:.0f}",
        "copy GB/s": f"{largest['bytes_moved'] / largest['us'] / 1e3:.1f}",
        "all-reduce 16 MiB ms": f"{reduced[0]['us'] / 1e3:.1f}" if reduced else "",
        "us per operator": f"{setup.dispatch_us:.1f}",
        "operators in steps": f"x {setup.scale:.2f}",
        "error of short trainings": f"± {100 * setup.log_error:.0f} %",
    }
