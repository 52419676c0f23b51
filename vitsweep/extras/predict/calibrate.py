"""Measure this machine: operators, collectives and a few short trainings, under 1 rank and under several."""

import json
import math
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vitsweep.execution.process import end_with_launcher, exit_now, joined_process_group
from vitsweep.execution.rank_processes import LocalRanks, fork_server, rendezvous, wait_for_ranks
from vitsweep.execution.runner import calibration_for
from vitsweep.extras.predict.calibration import (
    NOT_TIMED,
    Calibration,
    Exchanges,
    RankSetup,
    Shapes,
    kept_calibration,
    timed_key,
    torch_here,
)
from vitsweep.extras.predict.measured_rates import (
    CalibratedRates,
    exchanges_of,
    shapes_of,
    timed_ranks,
)
from vitsweep.extras.predict.step_time import StepTrace, predict_step
from vitsweep.files import write_atomically
from vitsweep.rates.profile import device_name
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.tables.stats import non_negative
from vitsweep.world import World, device_mesh

SECONDS = 165.0
"""Of all measurements; with the start of the processes and the traces it takes three minutes at most."""
PLAN_SECONDS = 60.0
"""The same of the operators of a plan's cells, which take 2 s on an idle machine."""
LATE_SECONDS = 5.0
"""For the ranks of one part to end a step that they are in when its time is over."""
OPERATOR_SHARE, COLLECTIVE_SHARE = 0.5, 0.15
"""Of the seconds of a part, its start included; the rest is for the short trainings."""
WEIGHT = {False: 2, True: 1}
"""Of a part among all, by whether it only repeats the short trainings."""
SLOW = 4.0
"""A format whose products are so many times slower than float32 is emulated: only tiny ones are timed."""
MOST_SENT = 4.0
"""Largest factor by which an exchange may last longer beside the work of a step than alone."""
HOST_BOUND = 1.5
"""On a GPU, a step below so many times the host's time says nothing of the rates of its operators."""
FORMATS = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "tf32")}
"""Device type -> formats in which operators are timed."""
FEWEST_DEGREES = 3.0
WORST_ERROR = 0.5
"""Of `RankSetup.log_error`; that of operators without a training that ended in time."""
TRAINING_SECONDS = {"cpu": 1.5, "cuda": 0.5}
"""Timed steps of one short training last about this long; other programs disturb a CPU."""
DISTURBED, LEAST_DISTURBED = 0.05, 0.25
"""Share of a step in which a rank may wait for a core, and of the steps that count in any case."""
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
GPU_TRAININGS: tuple[tuple[str, ...], ...] = tuple(
    (f"model={model}", f"model.depth={depth}", "data=synthetic", f"precision={precision}",
     f"batch.images_per_step={images}", f"optimizer=adamw_{optimizer}")
    for model, depth, precision, images, optimizer in (
        ("vit_tiny", 14, "bf16", 8, "fused"),  # waits for the host, and gives its time per operator
        ("vit_small", 2, "bf16", 512, "fused"),
        ("vit_base", 2, "bf16", 256, "fused"),
        ("vit_base", 2, "tf32", 128, "foreach"),
        ("vit_large", 2, "bf16", 128, "fused"),
        ("vit_large", 2, "bf16_params", 128, "fused"),
        ("vit_large", 2, "fp32", 32, "fused"),
    )
)  # fmt: skip
"""The same for GPUs, on which a step of the models above is as long as the host takes to queue it."""
SHARDED_TRAININGS: tuple[tuple[str, ...], ...] = (
    ("model.depth=3", "batch.images_per_step=32", "sharding=fsdp"),
    ("model=vit_tiny", "data=synthetic", "model.depth=2", "batch.images_per_step=8", "sharding=fsdp",
     "optimizer=adamw_foreach"),
    ("model=vit_small", "data=synthetic", "model.depth=2", "batch.images_per_step=4", "sharding=fsdp",
     "optimizer=adamw_fused"),
    ("model=vit_tiny", "data=synthetic", "model.depth=2", "batch.images_per_step=12", "sharding=zero1"),
)  # fmt: skip
"""Beside them under several ranks: what shards exchange takes otherwise than the sums of gradients."""


Quick = tuple[Shapes, Exchanges, tuple[str, ...]]
"""Products and attentions, collectives, and dtypes whose element-wise operators are timed beside them."""


def calibrate_machine(
    cells_for: Callable[[int], Sequence[CellSpec]],
    traces_of: Callable[[Sequence[CellSpec]], Sequence[StepTrace]],
    rank_counts: Sequence[int],
    say: Callable[[str], None] = lambda text: None,
    seconds: float = SECONDS,
) -> Calibration:
    """Measure this machine, in so many seconds at most.

    The short trainings run twice: after the operators, and again when everything else is done. A machine
    drifts from one minute to the next (clocks, other programs), so that what lies between the two
    belongs into the error that a prediction states. What the time did not suffice for is left out and said;
    the rest is kept.

    Args:
        cells_for: number of ranks -> short trainings (see `SHORT_TRAININGS`).
        traces_of: cells -> their operators and collectives.
        rank_counts: numbers of ranks to measure, such as 1 and 2.
        say: is given a line when a part begins, and where it ran out of time.
        seconds: of all parts.

    Raises:
        RuntimeError: the ranks failed; the text says where to read why.
    """
    end, left = time.monotonic() + seconds, len(rank_counts) * sum(WEIGHT.values())

    def part(trainings: Sequence[CellSpec], again: bool) -> dict[str, Any]:
        nonlocal left
        budget = WEIGHT[again] * (end - time.monotonic()) / left
        left -= WEIGHT[again]
        found = _measure(trainings, budget, with_operators=not again)
        late = sum(ms is None for ms in found["step_ms"])
        if late or found["late"]:
            what = [f"{late} of {len(trainings)} trainings"] if late else []
            said = " and ".join([*what, *(f"some {name}" for name in found["late"])])
            say(f"  timed out after {budget:.0f} s: {said} are left out")
        return found

    slow = _slow_formats(cells_for(rank_counts[0])[0])
    if slow:
        say(f"{', '.join(slow)} is emulated by this processor: no training in it")
    cells = {ranks: _without(slow, cells_for(ranks)) for ranks in rank_counts}
    measured = {}
    for ranks, trainings in cells.items():
        noun = f"rank{'s' * (ranks > 1)}"
        say(f"measuring {ranks} {noun}: operators, collectives, {len(trainings)} short trainings")
        measured[ranks] = part(trainings, again=False)
    say("measuring the short trainings again")
    again = {ranks: part(trainings, again=True) for ranks, trainings in cells.items()}
    setups, resources = [], cells_for(1)[0].resources
    for ranks, trainings in cells.items():
        setup = RankSetup(
            ranks=ranks,
            threads=trainings[0].resources.threads_per_rank,
            operators=measured[ranks]["operators"],
            collectives=measured[ranks]["collectives"],
        )
        timed = {(o["kind"], o["dtype"]) for o in setup.operators}
        if not timed >= {("matmul", "float32"), ("memory", "float32")}:
            raise RuntimeError(
                "Too little was measured in time to predict from: is the machine busy?"
            )
        rounds = zip(measured[ranks]["step_ms"], again[ranks]["step_ms"], strict=True)
        times = [[ms for ms in both if ms] for both in rounds]
        if not any(times):
            setups.append(replace(setup, log_error=WORST_ERROR))
            continue
        known = [(t, ms) for t, ms in zip(traces_of(trainings), times, strict=True) if ms]
        done, step_ms = [t for t, _ in known], [ms for _, ms in known]
        setups.append(fitted(setup, done, step_ms, resources.device == "cuda"))
    return Calibration(
        device=str(device_name(resources.device)),
        device_type=resources.device,
        torch=torch_here(),
        date=date.today().isoformat(),
        cores=resources.cores_per_node,
        setups=tuple(setups),
    )


def time_operators(cells: Iterable[tuple[CellSpec, StepTrace]]) -> None:
    """Time operators of cells on this machine's processor that are not known, and keep the times.

    Raises:
        RuntimeError: the ranks failed, or had no time for some; the text says which.
        ValueError: what is kept of this processor is damaged.
    """
    kept = kept_calibration(str(device_name("cpu")))
    alike: dict[tuple[int, int], list[tuple[CellSpec, StepTrace]]] = defaultdict(list)
    for cell, trace in cells:
        alike[timed_ranks(cell.resources)].append((cell, trace))
    for (ranks, threads), group in alike.items():
        known = kept.timed.get(timed_key(ranks, threads), NOT_TIMED)
        traces = [trace for _, trace in group]
        shapes = shapes_of(traces, known["operators"])
        exchanges = exchanges_of(traces, known["collectives"]) if ranks > 1 else []
        if known["operators"] and not any((*shapes.values(), exchanges)):
            continue
        cell = group[0][0]
        resources = replace(cell.resources, nodes=1, ranks_per_node=ranks, threads_per_rank=threads)
        mesh = replace(cell.mesh, **dict.fromkeys(vars(cell.mesh), 1) | {"replicate": ranks})
        alone = replace(cell, resources=resources, mesh=mesh)
        elementwise = {row["dtype"] for row in known["operators"] if row["kind"] == "memory"}
        others = tuple(dtype for dtype in shapes if dtype not in elementwise)
        quick = (shapes, exchanges, others)
        found = _measure([alone], PLAN_SECONDS, quick=quick)
        known = {name: [*known[name], *found[name]] for name in NOT_TIMED}
        kept = kept.keep_timed(timed_key(ranks, threads), known)
        if found["late"]:
            raise RuntimeError(
                f"not all operators were timed in {PLAN_SECONDS:.0f} s (is the machine busy?): the same "
                "command times the rest"
            )


def _slow_formats(cell: CellSpec) -> tuple[str, ...]:
    """Return the formats whose products this machine emulates, by a product of each."""
    with TemporaryDirectory() as folder:
        rates = calibration_for(cell, Path(folder), platform.node())
    fp32 = rates.get("float32", 0.0)
    return tuple(d for d in ("bfloat16",) if SLOW * rates.get(d, fp32) < fp32)


def _without(slow: tuple[str, ...], cells: Sequence[CellSpec]) -> list[CellSpec]:
    """Return the trainings that are not in a slow format."""
    plans = [(cell, cell.precision.plan()) for cell in cells]
    return [cell for cell, plan in plans if (plan.autocast_dtype or plan.param_dtype) not in slow]


def fitted(
    setup: RankSetup,
    traces: Sequence[StepTrace],
    step_ms: Sequence[Sequence[float]],
    asynchronous: bool = False,
) -> RankSetup:
    """Return a setup with the host time per operator and the scales that explain whole steps best.

    On a CPU the step is scale x operators + host time x dispatches + sent scale x communication: a
    non-negative least-squares fit of relative errors. On a GPU host and device work at once: the host time
    is that of the training with the least time per dispatch, and the scale the median over the steps
    that are longer than what their host takes.

    The error that a prediction states has two parts: that of the model, from each training's mean
    as the others predict it, and that of repetition, from the times of one training that ran twice. Its
    degrees of freedom are Satterthwaite's.

    Args:
        setup: measured operators and collectives.
        traces: of the short trainings.
        step_ms: their measured step times, one for each time that a training ran.
        asynchronous: whether the device is a GPU.
    """
    import numpy as np

    logs = [np.log(times) for times in step_ms]
    measured = np.exp([of_one.mean() for of_one in logs])
    found = _with_scales(setup, traces, measured, asynchronous)
    errors = []
    for own, trace in enumerate(traces):
        if others := [i for i in range(len(traces)) if i != own]:
            fit = _with_scales(setup, [traces[i] for i in others], measured[others], asynchronous)
            predicted = predict_step(trace, _rates(fit, asynchronous)).step_time_ms
            errors.append(math.log(measured[own] / predicted))
    of_model = float(np.mean(np.square(errors or [WORST_ERROR])))
    terms = 1 if asynchronous else 2 + (setup.ranks > 1)
    left = max(1, len(errors) - terms)
    repeated = [of_one for of_one in logs if len(of_one) > 1]
    of_repetition = float(np.mean([of_one.var(ddof=1) for of_one in repeated])) if repeated else 0.0
    # half of the repetition's variance is in the mean of two already
    variance, half = of_model + of_repetition / 2, of_repetition / 2
    parts = of_model**2 / left + half**2 / max(1, len(repeated))
    return replace(
        found,
        log_error=min(WORST_ERROR, max(0.05, float(np.sqrt(variance)))),
        degrees=max(FEWEST_DEGREES, variance**2 / parts) if parts > 0 else float(left),
        step_ms=(float(measured.min()), float(measured.max())),
    )


def _rates(setup: RankSetup, asynchronous: bool) -> CalibratedRates:
    """Return the rates of the very ranks that the setup was measured under."""
    return CalibratedRates(
        setup,
        ranks_per_node=setup.ranks,
        threads=setup.threads,
        cores=setup.ranks * setup.threads,
        title="",
        asynchronous=asynchronous,
    )


def _with_scales(
    setup: RankSetup, traces: Sequence[StepTrace], measured: Any, asynchronous: bool
) -> RankSetup:
    """Return a setup with the host time and the scales that explain these steps (in ms) best."""
    import numpy as np

    alone = [predict_step(trace, _rates(setup, asynchronous)).parts_ms for trace in traces]
    operators = np.array([parts["compute"] + parts["optimizer"] for parts in alone])
    sent = np.array([parts["communication"] for parts in alone])
    dispatches = np.array([sum(trace.dispatches.values()) for trace in traces], dtype=float)
    if not asynchronous:  # those of the optimizer count less
        per_us = _rates(replace(setup, dispatch_us=1.0), asynchronous)
        dispatches = np.array([1e3 * predict_step(t, per_us).parts_ms["launch"] for t in traces])
    if asynchronous:
        host_ms = dispatches * np.min(measured / dispatches)
        known = measured > HOST_BOUND * host_ms
        return replace(
            setup,
            dispatch_us=float(np.min(measured / dispatches)) * 1e3,
            scale=float(np.median((measured / operators)[known])) if known.any() else 1.0,
        )
    columns = np.stack([operators, dispatches / 1e3, sent], axis=1) / measured[:, None]
    scale, host_us, sent_scale = non_negative(columns, np.ones(len(measured)))
    if sent.any():  # the others once more beside it
        sent_scale = min(MOST_SENT, max(1.0, sent_scale))
        rest = np.maximum(0.05, 1 - sent_scale * columns[:, 2])
        scale, host_us = non_negative(columns[:, :2], rest)
    return replace(
        setup,
        scale=max(0.3, float(scale)),
        dispatch_us=float(host_us),
        sent_scale=float(sent_scale) if sent.any() else 1.0,
    )


def measure_steps(cells: Sequence[CellSpec], seconds: float) -> list[float]:
    """Return the median step time in milliseconds of short trainings with the same number of ranks.

    Raises:
        RuntimeError: the ranks failed, or did not end within `seconds`; the text says which.
    """
    found = _measure(cells, seconds, with_operators=False)["step_ms"]
    if None in found:
        raise RuntimeError(f"{found.count(None)} trainings did not end within {seconds:.0f} s.")
    return list(found)


def _measure(
    cells: Sequence[CellSpec],
    seconds: float,
    *,
    with_operators: bool = True,
    quick: Quick | None = None,
) -> dict[str, Any]:
    """Let the ranks of the cells measure for some seconds; return what rank 0 wrote by then.

    Args:
        cells: short trainings.
        seconds: of all.
        with_operators: whether operators and collectives are measured too.
        quick: measure these quickly, and no training; None for common shapes.

    Returns:
        `operators, collectives`; `late`, which of them lack something; `step_ms` of each cell, None where
        its training did not end in time.
    """
    with TemporaryDirectory() as folder, rendezvous() as init_method:
        answer = Path(folder) / "rates.json"
        world = range(cells[0].resources.world_size)
        end = time.monotonic() + seconds
        arguments = (tuple(cells), init_method, str(answer), with_operators, end, quick)
        ranks = LocalRanks(fork_server(), measure_rank, arguments, world, answer.parent)
        try:
            wait_for_ranks(ranks, seconds + LATE_SECONDS, grace_seconds=1.0)
        finally:
            ranks.kill()
        with suppress(OSError, ValueError):
            found = dict(json.loads(answer.read_text(encoding="utf-8")))
            missing = [None] * (len(cells) - len(found["step_ms"]))
            return found | {"step_ms": [*found["step_ms"], *missing]}
        logs = "\n".join(
            p.read_text(encoding="utf-8", errors="replace")[-2000:]
            for p in Path(folder).glob("rank*.log")
        )
    why = logs.strip() or f"nothing was measured within {seconds:.0f} s: is the machine busy?"
    raise RuntimeError(f"The ranks could not measure their rates: {why}")


def measure_rank(
    cells: Sequence[CellSpec],
    init_method: str,
    answer: str,
    with_operators: bool,
    end: float,
    quick: Quick | None,
    rank: int,
    local_rank: int,
) -> None:
    """Run one rank; rank 0 writes times of operators, collectives and steps as JSON to `answer`.

    It writes after each part, so that a rank that is ended has left what it had. `end` is a time of
    `time.monotonic`, which all processes of a machine share.
    """
    from vitsweep.extras.predict.operators import collective_times, common_shapes, operator_times

    end_with_launcher()
    limit = replace(cells[0].measurement, timeout_min=(end - time.monotonic() + LATE_SECONDS) / 60)
    try:
        with joined_process_group(
            replace(cells[0], measurement=limit), rank, local_rank, init_method
        ) as world:
            found: dict[str, Any] = {"operators": [], "collectives": [], "step_ms": [], "late": []}

            def write() -> None:
                if rank == 0:
                    write_atomically(Path(answer), json.dumps(found))

            def before(stop: float) -> bool:
                return _all_before(stop, world)

            if with_operators:
                left = end - time.monotonic()
                stop = time.monotonic() + OPERATOR_SHARE * left
                formats = FORMATS[world.device.type]
                common = (common_shapes(world.device.type, formats), None, formats)
                shapes, exchanges, others = quick or common
                found["operators"] = operator_times(world, shapes, others, stop, quick is not None)
                found["late"] += [] if before(stop) else ["operators"]
                write()
                stop = time.monotonic() + COLLECTIVE_SHARE * left
                found["collectives"] = collective_times(world, partial(before, stop), exchanges)
                found["late"] += [] if before(stop) else ["collectives"]
            write()
            for cell in cells if quick is None else ():
                if not before(end):
                    break
                found["step_ms"].append(_step_ms(cell, world))
                write()
    except Exception as error:
        print(f"Calibration of rank {rank} failed: {error}", file=sys.stderr)
        exit_now(1)


def _all_before(end: float, world: World) -> bool:
    """Tell whether it is earlier on every rank; all ranks get the same answer."""
    import torch
    import torch.distributed as dist

    late = torch.tensor(float(time.monotonic() > end), device=world.device)
    dist.all_reduce(late, dist.ReduceOp.MAX)
    return not late


def _waited_ms() -> float:
    """Return how long the threads of this process have waited for a core so far; 0 if unknown."""
    waited = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # the thread has ended
            waited += int(path.read_text(encoding="ascii").split()[1])
    return waited / 1e6


def _step_ms(cell: CellSpec, world: World) -> float:
    """Return the median step time of a short training, over a mesh of its own.

    All ranks make the same number of steps. Those in which a rank waited for a core do not count, as far
    as a quarter of the steps is left.
    """
    import torch
    import torch.distributed as dist

    from vitsweep.model.build import build_model
    from vitsweep.parallelize import parallelize
    from vitsweep.training.timed_steps import StepClock, endless

    if world.shape != cell.mesh:
        mesh = device_mesh(world.device.type, cell.mesh)
        world = replace(world, shape=cell.mesh, mesh=mesh)
    torch.manual_seed(cell.seed)
    with torch.device("meta"):
        model = build_model(cell)
    trainer = parallelize(model, cell, world)
    stream = endless(cell.data.open(cell, world))

    def median_ms(steps: int) -> float:
        clock, waited = StepClock(world.device), [_waited_ms()]
        clock.mark()
        for _ in range(steps):
            trainer.step(stream)
            clock.mark()
            waited.append(_waited_ms())
        waits = torch.tensor(waited, dtype=torch.float64).diff().to(world.device)
        dist.all_reduce(waits, dist.ReduceOp.MAX)
        least = float(waits.quantile(LEAST_DISTURBED))
        steps_ms = zip(clock.times_ms(), waits.tolist(), strict=True)
        return statistics.median(ms for ms, w in steps_ms if w <= max(least, DISTURBED * ms))

    median_ms(2)
    once = torch.tensor(median_ms(1), dtype=torch.float64, device=world.device)
    dist.all_reduce(once, dist.ReduceOp.MAX)
    most_ms = 1e3 * TRAINING_SECONDS[world.device.type]
    return median_ms(min(60, max(5, round(most_ms / float(once)))))
