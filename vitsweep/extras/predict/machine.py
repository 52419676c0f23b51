"""`vitsweep doctor --calibrate`: measure this machine, so that `plan` predicts its step times."""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import nan

import psutil
from pandas import DataFrame
from rich.console import Console

from vitsweep.composition.composer import Composer
from vitsweep.errors import ExitCode
from vitsweep.extras.predict.calibrate import (
    GPU_TRAININGS,
    SHARDED_TRAININGS,
    SHORT_TRAININGS,
    calibrate_machine,
)
from vitsweep.extras.predict.calibration import Calibration, RankSetup, kept_calibration
from vitsweep.extras.predict.step_time import StepTrace
from vitsweep.extras.predict.trace_pool import trace_cells
from vitsweep.measure.environment import busy_seconds, own_seconds
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.resources import Machine
from vitsweep.tables.formatting import number
from vitsweep.tables.render import TextTable

BUSY = 0.1
"""Share of the cores above which the work of other programs disturbs the measurement."""


class OtherWork(threading.Thread):
    """Watches, while the `with` block lasts, what share of the cores other programs use.

    Attributes:
        share: mean of all seconds so far, from 0 to 1.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.share, self._left = 0.0, threading.Event()

    def __enter__(self) -> "OtherWork":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self.join()

    def run(self) -> None:
        """Compare the busy time of the machine with that of this command, second by second."""
        shares: list[float] = []
        before, own = psutil.cpu_times(), own_seconds()
        while not self._left.wait(1.0):
            now, mine = psutil.cpu_times(), own_seconds()
            busy, whole = (f(now) - f(before) for f in (busy_seconds, sum))
            ours = sum(max(0.0, mine[p] - own.get(p, 0.0)) for p in mine)
            shares.append(min(1.0, max(0.0, (busy - ours) / max(whole, 1e-9))))
            self.share = sum(shares) / len(shares)
            before, own = now, mine


def calibrate(console: Console) -> int:
    """Measure, save and print the rates of this machine; return the exit code."""
    machine = Machine.here()
    started = time.monotonic()
    composer = Composer()

    def cells_for(ranks: int) -> list[CellSpec]:
        shared = [f"resources.ranks_per_node={ranks}", "measurement=smoke"]
        alone = SHORT_TRAININGS if machine.device == "cpu" else GPU_TRAININGS
        trainings = (*alone, *(SHARDED_TRAININGS if ranks > 1 else ()))
        return [plan_cell(composer.compose([*o, *shared]), machine).spec for o in trainings]

    most = machine.devices_per_node or machine.cores_per_node
    counts = sorted({1, min(2, most), most} if machine.device == "cpu" else {1, most})
    try:
        with OtherWork() as other:
            found = calibrate_machine(
                cells_for,
                _traces,
                counts[:2],
                console.print,
            )
    except RuntimeError as error:
        console.print(str(error))
        return ExitCode.not_all_measured
    except KeyboardInterrupt:
        console.print("Stopped. Nothing of this calibration is kept; an earlier one stays in use.")
        return ExitCode.interrupted
    if other.share > BUSY:
        console.print(
            f"Other programs used {100 * other.share:.0f} % of the cores while it measured: repeat it when "
            "the machine is idle.",
            style="yellow",
        )
    with suppress(ValueError):
        kept = kept_calibration(found.device)
        found = replace(found, matmul=kept.matmul, quick=kept.quick)
    path = found.save()
    console.print(_summary(found))
    console.print(
        f"Saved as {path} after {time.monotonic() - started:.0f} s: `python -m vitsweep plan` uses it on "
        f"{found.device} with torch {found.torch}.",
        soft_wrap=True,
    )
    return ExitCode.ok


def _traces(cells: Sequence[CellSpec]) -> list[StepTrace]:
    traces = trace_cells({str(number): cell for number, cell in enumerate(cells)})
    found = [traces[str(number)] for number in range(len(cells))]
    if failed := [trace for trace in found if isinstance(trace, str)]:
        raise RuntimeError(f"A short training could not be traced: {failed[0]}")
    return [trace for trace in found if isinstance(trace, StepTrace)]


def _summary(calibration: Calibration) -> TextTable:
    rows = [_setup(setup) for setup in calibration.setups]
    return TextTable(
        DataFrame(rows),
        f"{calibration.device}, {calibration.date}: products, copies, an all-reduce of 16 MiB",
    )


def _setup(setup: RankSetup) -> dict[str, str]:
    rates = {
        dtype: max(
            (
                2e-3 * row["shape"][1] * row["shape"][2] * row["shape"][3] / row["us"]
                for row in setup.operators
                if row["kind"] == "matmul" and row["dtype"] == dtype
            ),
            default=nan,
        )
        for dtype in ("float32", "bfloat16")
    }
    copies = [r for r in setup.operators if r["name"] == "copy_" and r["dtype"] == "float32"]
    largest = max(copies, key=lambda row: row["bytes_moved"], default={"bytes_moved": nan, "us": 1})
    reduced = [r for r in setup.collectives if r["name"] == "all_reduce" and r["bytes"] == 1 << 24]
    return {
        "ranks x threads": f"{setup.ranks} x {setup.threads}",
        "GFLOP/s fp32": number(rates["float32"]),
        "bf16": number(rates["bfloat16"]),
        "copy GB/s": f"{largest['bytes_moved'] / largest['us'] / 1e3:.1f}",
        "all-reduce ms": f"{reduced[0]['us'] / 1e3:.1f}" if reduced else "",
        "us per operator": f"{setup.dispatch_us:.1f}",
        "in steps": f"x {setup.scale:.2f}",
        "error": f"± {100 * setup.log_error:.0f} %",
    }
