"""Measure this machine: operators, collectives and a few short trainings, under 1 rank and under several."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vitsweep.execution.process import end_with_launcher, exit_now
from vitsweep.execution.rank_processes import LocalRanks, fork_server, rendezvous, wait_for_ranks
from vitsweep.files import write_atomically
from vitsweep.predict.measured_rates import CalibratedRates
from vitsweep.predict.step_trace import StepTrace
from vitsweep.rates.calibration import Calibration, RankSetup
from vitsweep.rates.device import device_name
from vitsweep.spec.cell_spec import CellSpec

TIMEOUT_S = 600
TRAINING_SECONDS = 1.5
"""Timed steps of one short training last about this long."""
SHORT_TRAININGS: tuple[tuple[str, ...], ...] = (
    ("model.depth=3", "batch.images_per_step=16"),
    ("model.depth=3", "batch.images_per_step=256", "optimizer=adamw_fused"),
    ("model=vit_tiny", "data=synthetic", "model.depth=2", "batch.images_per_step=6"),
    ("model=vit_tiny", "data=synthetic", "model.depth=2", "batch.images_per_step=20",
     "optimizer=adamw_foreach"),
    ("model=vit_tiny", "data=synthetic", "model.depth=2", "precision=bf16", "batch.images_per_step=6"),
    ("model=vit_tiny", "data=synthetic", "model.depth=2", "precision=bf16",
     "batch.images_per_step=20", "optimizer=adamw_fused"),
    ("model=vit_small", "data=synthetic", "model.depth=2", "batch.images_per_step=8",
     "optimizer=adamw_fused"),
)  # fmt: skip
"""Overrides of the trainings that relate operators alone to whole steps; no model in `conf/` has their
depths, so that none of them is a cell that anybody measures."""


def calibrate_machine(
    cells_for: Callable[[int], Sequence[CellSpec]],
    traces_of: Callable[[Sequence[CellSpec]], Sequence[StepTrace]],
    rank_counts: Sequence[int],
    say: Callable[[str], None] = lambda text: None,
) -> Calibration:
    """Measure this machine.

    The short trainings run twice: after the operators, and again when everything else is done. A machine
    drifts from one minute to the next (clocks, other programs), so that what lies between the two
    belongs into the error that a prediction states.

    Args:
        cells_for: number of ranks -> short trainings (see `SHORT_TRAININGS`).
        traces_of: cells -> their operators and collectives.
        rank_counts: numbers of ranks to measure, such as 1 and 2.
        say: is given a line when a part begins.

    Raises:
        RuntimeError: the ranks failed; the text says where to read why.
    """
    cells = {ranks: list(cells_for(ranks)) for ranks in rank_counts}
    measured = {}
    for ranks, trainings in cells.items():
        noun = f"rank{'s' * (ranks > 1)}"
        say(f"{ranks} {noun}: operators, collectives, {len(trainings)} short trainings")
        measured[ranks] = _measure(trainings)
    say("the short trainings again")
    again = {ranks: measure_steps(trainings) for ranks, trainings in cells.items()}
    setups, resources = [], cells_for(1)[0].resources
    for ranks, trainings in cells.items():
        setup = RankSetup(
            ranks=ranks,
            threads=trainings[0].resources.threads_per_rank,
            operators=measured[ranks]["operators"],
            collectives=measured[ranks]["collectives"],
        )
        traces, step_ms = list(traces_of(trainings)), [*measured[ranks]["step_ms"], *again[ranks]]
        setups.append(fitted(setup, [*traces, *traces], step_ms, resources.device == "cuda"))
    return Calibration(
        device=str(device_name(resources.device)),
        device_type=resources.device,
        torch=version("torch"),
        date=date.today().isoformat(),
        cores=resources.cores_per_node,
        setups=tuple(setups),
    )


def fitted(
    setup: RankSetup,
    traces: Sequence[StepTrace],
    step_ms: Sequence[float],
    asynchronous: bool = False,
) -> RankSetup:
    """Return a setup with the host time per operator and the scale that explain whole steps best.

    On a CPU the step is scale x operators + host time x dispatches + communication: a non-negative
    least-squares fit of relative errors. On a GPU host and device work at once, so that only the scale
    is fitted, to the steps; the host time stays that of the smallest training.

    Args:
        setup: measured operators and collectives.
        traces: of the short trainings, once for each time that they ran.
        step_ms: their measured step times.
        asynchronous: whether the device is a GPU.
    """
    import numpy as np
    from scipy.optimize import nnls

    from vitsweep.predict.step_time import predict_step

    rates = CalibratedRates(
        setup,
        ranks_per_node=setup.ranks,
        threads=setup.threads,
        cores=setup.ranks * setup.threads,
        title="",
        asynchronous=asynchronous,
    )
    alone = [predict_step(trace, rates).parts_ms for trace in traces]
    operators = np.array([parts["compute"] + parts["optimizer"] for parts in alone])
    sent = np.array([parts["communication"] for parts in alone])
    dispatches = np.array([sum(trace.dispatches.values()) for trace in traces], dtype=float)
    measured = np.array(step_ms)
    if asynchronous:
        host_us = float(np.min(measured / dispatches)) * 1e3
        setup = replace(setup, dispatch_us=host_us, scale=float(np.median(measured / operators)))
        fit = measured
    else:
        matrix = np.stack([operators, dispatches / 1e3], axis=1) / measured[:, None]
        (scale, host_us), _ = nnls(matrix, np.maximum(0.05, 1 - sent / measured))
        setup = replace(setup, scale=max(0.3, float(scale)), dispatch_us=float(host_us))
        fit = setup.scale * operators + setup.dispatch_us * dispatches / 1e3 + sent
    errors = np.log(measured / fit)
    spread = float(np.sqrt(np.sum(errors**2) / max(1, len(errors) - 2)))
    return replace(setup, log_error=min(0.5, max(0.05, spread)))


def measure_steps(cells: Sequence[CellSpec]) -> list[float]:
    """Return the median step time in milliseconds of short trainings with the same number of ranks.

    Raises:
        RuntimeError: the ranks failed; the text says why.
    """
    return list(_measure(cells, with_operators=False)["step_ms"])


def _measure(cells: Sequence[CellSpec], with_operators: bool = True) -> dict[str, Any]:
    """Let the ranks of the cells measure; return what rank 0 wrote."""
    with TemporaryDirectory() as folder, rendezvous() as init_method:
        answer = Path(folder) / "rates.json"
        world = range(cells[0].resources.world_size)
        arguments = (tuple(cells), init_method, str(answer), with_operators)
        ranks = LocalRanks(fork_server(), measure_rank, arguments, world, answer.parent)
        try:
            wait_for_ranks(ranks, TIMEOUT_S, grace_seconds=1.0)
        finally:
            ranks.kill()
        with suppress(OSError, ValueError):
            return dict(json.loads(answer.read_text(encoding="utf-8")))
        logs = "\n".join(
            p.read_text(encoding="utf-8", errors="replace")[-2000:]
            for p in Path(folder).glob("rank*.log")
        )
    raise RuntimeError(f"The ranks could not measure their rates. {logs}")


def measure_rank(
    cells: Sequence[CellSpec],
    init_method: str,
    answer: str,
    with_operators: bool,
    rank: int,
    local_rank: int,
) -> None:
    """Run one rank; rank 0 writes times of operators, collectives and steps as JSON to `answer`."""
    from vitsweep.execution.process import joined_process_group
    from vitsweep.rates.operators import collective_times, operator_times

    end_with_launcher()
    limit = replace(cells[0].measurement, timeout_min=TIMEOUT_S / 60)
    try:
        with joined_process_group(
            replace(cells[0], measurement=limit), rank, local_rank, init_method
        ) as world:
            found: dict[str, Any] = {}
            if with_operators:
                found["operators"] = operator_times(world, ("float32", "bfloat16"))
                found["collectives"] = collective_times(world)
            found["step_ms"] = [_step_ms(cell, world) for cell in cells]
            if rank == 0:
                write_atomically(Path(answer), json.dumps(found))
    except Exception as error:
        print(f"Calibration of rank {rank} failed: {error}", file=sys.stderr)
        exit_now(1)


def _step_ms(cell: CellSpec, world: Any) -> float:
    """Return the median step time of a short training; all ranks make the same number of steps."""
    import torch
    import torch.distributed as dist

    from vitsweep.model.build import build_model
    from vitsweep.parallelize import parallelize
    from vitsweep.training.timed_steps import endless

    torch.manual_seed(cell.seed)
    with torch.device("meta"):
        model = build_model(cell)
    trainer = parallelize(model, cell, world)
    stream = endless(cell.data.open(cell, world))

    def timed() -> float:
        started = time.perf_counter()
        trainer.step(stream)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    for _ in range(2):
        timed()
    once = torch.tensor(timed(), dtype=torch.float64, device=world.device)
    dist.all_reduce(once, dist.ReduceOp.MAX)
    steps = min(60, max(5, round(TRAINING_SECONDS / float(once))))
    return statistics.median(timed() for _ in range(steps)) * 1e3
