"""From the samples of all ranks to the metrics of one run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import NormalDist
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from vitsweep.collectives.primitives import Purpose
from vitsweep.errors import VitsweepError
from vitsweep.extras import INSTRUMENTS, load
from vitsweep.measure.communication import Collectives, SentBytes, communication_ms
from vitsweep.measure.environment import DeviceState
from vitsweep.measure.utilization import throughput, utilization
from vitsweep.spec.cell_spec import CellSpec

# From the step times of all ranks to the step time of the run: how long its window lasts.


UNEVEN = 1.1
"""Steps are uneven where their mean is more than this many times their median."""
EXPLAINED = 0.5
"""Data is the cause where steps waited for it at least this share of the time beyond the median."""

UNMOVED = 0.01
"""Share of weights that never moved above which a run has the flag."""
DRIFT_SHARE = 0.03
"""A trend that moves the step time by more than this share within a run counts as drift."""

QUOTA_SHARE = 0.01
"""As many threads as the quota has CPUs are held back now and then, for some 0.0004 of the time."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """The timed window of a run.

    Attributes:
        warmup_steps: steps before the window.
        steps: steps in it, without those whose update the loss scaler skipped.
        metrics: step time columns of the record; {} without a step.
        drifting: whether step times show a trend.
        uneven: whether a few slow steps make the mean much larger than the median; None without a step.
        uneven_cause: `data` where waiting for data explains them, else `unknown`; None for even steps.
    """

    warmup_steps: int
    steps: int
    metrics: dict[str, float | None] = field(default_factory=dict)
    drifting: bool = False
    uneven: bool | None = None
    uneven_cause: str | None = None


def summarize_window(
    times_ms: Sequence[Sequence[float]],
    skipped: Sequence[bool],
    warmup_steps: int,
    data_waits_ms: Sequence[Sequence[float]],
) -> Window:
    """Return the step time of a run: elapsed time of the window on the slowest rank, per step.

    A median over steps would hide a loader that stalls now and then. A maximum over ranks of every
    single step would add up jitter that the ranks catch up with in the next step.

    Every step of the window counts, a slow first one too: a rule that cuts slow steps from the
    samples would also cut the stalls of a loader. What still falls is flagged as `drifting`.
    Steps whose update was skipped count neither as images nor as time.

    Args:
        times_ms: by rank and step, warm-up included.
        skipped: by step, whether the loss scaler skipped the update; the same on all ranks.
        warmup_steps: steps before the window.
        data_waits_ms: by rank and step, time in which the host waited for data.
    """
    times, waits = np.asarray(times_ms, float), np.asarray(data_waits_ms, float)
    counted = np.arange(times.shape[1]) >= warmup_steps
    counted &= ~np.asarray(skipped, bool)
    times, waits = times[:, counted], waits[:, counted]
    steps = times.shape[1]
    if not steps:
        return Window(warmup_steps=warmup_steps, steps=0)
    elapsed = times.sum(axis=1)
    slowest = times[elapsed.argmax()]
    mean, median = float(slowest.mean()), float(np.median(slowest))
    uneven, cause = mean > UNEVEN * median, None
    if uneven:  # whether waiting for data explains the time that slow steps took beyond the median
        slow, waited = slowest > median, waits.max(axis=0)
        longer = np.maximum(0, waited[slow] - np.median(waited[~slow])).sum()
        cause = "data" if longer >= EXPLAINED * (slowest[slow] - median).sum() else "unknown"
    return Window(
        warmup_steps=warmup_steps,
        steps=steps,
        metrics={
            "step_time_ms": mean,
            "data_wait_ms": float(waits.mean(axis=1).max()),
            "window_seconds": float(elapsed.max()) / 1e3,
        },
        drifting=is_drifting(slowest.tolist()),
        uneven=uneven,
        uneven_cause=cause,
    )


def is_drifting(times_ms: list[float]) -> bool:
    """Whether the steady steps show a trend: Theil-Sen slope whose 95 % interval excludes zero.

    Args:
        times_ms: step times after warm-up; fewer than 8 show nothing.
    """
    if len(times_ms) < 8:
        return False
    slope, low, high = theil_sen(np.asarray(times_ms))
    moved = abs(slope) * len(times_ms) / float(np.median(times_ms))
    return bool(low * high > 0 and moved > DRIFT_SHARE)


def theil_sen(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the median slope per step and its 95 % interval (P. K. Sen, JASA 63, 1968, equation 2.6).

    It is `scipy.stats.theilslopes` of at least 8 values: importing that takes a second of each command.
    """
    size, (first, second) = len(values), np.triu_indices(len(values), 1)
    slopes = np.sort((values[second] - values[first]) / (second - first))
    ties = np.unique(values, return_counts=True)[1]
    variance = (_of_ties(size) - _of_ties(ties).sum()) / 18
    width = NormalDist().inv_cdf(0.975) * np.sqrt(variance)
    low, high = round((len(slopes) - width) / 2) - 1, round((len(slopes) + width) / 2)
    return float(np.median(slopes)), float(slopes[low]), float(slopes[high])


def _of_ties(size: Any) -> Any:
    return size * (size - 1) * (2 * size + 5)


@dataclass(kw_only=True)
class RankSamples:
    """What one rank measured: in the timed steps, and with instruments after them.

    Attributes:
        step_times_ms: one per timed step, warm-up included.
        data_waits_ms: one per timed step, time in which the host waited for data.
        warmup_steps: timed steps before the window; the same on every rank.
        warmup_steps_added: how many of them because steps were still becoming faster.
        cut_short: whether `max_seconds` left steps of the window out; the same on every rank.
        losses: mean loss over the rank's images, one per timed step.
        first_gradients: sketch of the first step's gradients (`training.shards`), the same on every rank.
        unmoved_weights: what the timed steps left as it was (`training.shards`).
        skipped: one per timed step, True where an overflow made the scaler skip the update.
        setup_seconds: from the start of the process to the first step.
        phases_ms: phase -> milliseconds, from instrumented steps.
        collectives: of one step; None where not profiled.
        device_state: clock, power and throttling in the timed window.
        sent: bytes sent in one step.
        compiled_graphs: how many torch.compile made for the timed steps; None where unknown.
        compile_seconds: that it took for them; None where unknown.
        memory: memory columns of the record, GiB.
        memory_reason: why some of them are empty, or "".
        throttled_seconds: for which a CPU quota held the rank's control group back in the window, summed
            over cores; None where unknown.
        own_cpu_seconds: CPU time of the rank during the timed steps.
        environment: environment columns of the record.
        machine: equal for ranks that run on one kernel, whatever their nodes are called.
        extra: what instruments of optional features found, by the key of `measurement` that asks for each.
    """

    step_times_ms: list[float]
    data_waits_ms: list[float]
    warmup_steps: int
    warmup_steps_added: int
    cut_short: bool
    losses: list[float]
    skipped: list[bool]
    setup_seconds: float
    device_state: DeviceState
    compiled_graphs: int | None
    compile_seconds: float | None
    memory: dict[str, float | None]
    own_cpu_seconds: float
    environment: dict[str, Any]
    machine: str
    phases_ms: dict[str, float] = field(default_factory=dict)
    collectives: Collectives | None = None
    sent: SentBytes = field(default_factory=SentBytes)
    memory_reason: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    first_gradients: list[float] = field(default_factory=list)
    unmoved_weights: dict[str, list[float]] = field(default_factory=dict)
    throttled_seconds: float | None = None

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "RankSamples":
        """Read what `dataclasses.asdict` made of it, also where JSON has been between."""
        parts = {
            "device_state": DeviceState(**plain["device_state"]),
            "sent": SentBytes(**plain["sent"]),
        }
        if plain["collectives"] is not None:
            parts["collectives"] = [tuple(each) for each in plain["collectives"]]
        return cls(**{**plain, **parts})

    def with_instruments(self, found: Mapping[str, Any]) -> "RankSamples":
        """Add what instruments found after the timed steps, as plain values by the names here."""
        plain = asdict(self)
        both = {key: plain[key] | found[key] for key in ("memory", "environment")}
        return self.from_plain(plain | dict(found) | both)


@dataclass(kw_only=True)
class Summary:
    """Metrics, validity and raw samples of a run, ready for its record."""

    metrics: dict[str, float | None]
    validity: dict[str, Any]
    environment: dict[str, Any]
    samples: dict[str, Any]


def summarize(cell: CellSpec, ranks: list[RankSamples]) -> Summary:
    """Combine the ranks: the run takes as long as its slowest rank, memory is the worst rank's.

    Raises:
        VitsweepError: the ranks ran on different kinds of devices.
    """
    devices = Counter(rank.environment["device"] for rank in ranks)
    if len(devices) > 1:
        listed = ", ".join(f"{count} on `{device}`" for device, count in devices.items())
        raise VitsweepError(
            f"The ranks of this run used different devices ({listed}): its numbers would be of no "
            "machine. Ask for nodes of one kind (on Slurm: `hydra.launcher.constraint`)."
        )
    window = summarize_window(
        [rank.step_times_ms for rank in ranks],
        ranks[0].skipped,
        ranks[0].warmup_steps,
        [rank.data_waits_ms for rank in ranks],
    )
    step_time_ms = window.metrics.get("step_time_ms")
    speed = throughput(cell, step_time_ms) if step_time_ms else {}
    slowest = max((rank.phases_ms for rank in ranks), key=lambda phases: sum(phases.values()))
    traced = [(r.collectives, r.machine) for r in ranks if r.collectives is not None]
    exchanges = communication_ms(*zip(*traced, strict=True)) if traced else None
    metrics = (
        speed
        | window.metrics
        | {f"{name}_ms": ms for name, ms in slowest.items()}
        | {"communication_ms": exchanges}
        | _sent(ranks)
        | {column: _largest([r.memory[column] for r in ranks]) for column in ranks[0].memory}
        | _losses(cell, ranks)
    )
    unmoved = _unmoved([rank.unmoved_weights for rank in ranks])
    moved = [share for share in unmoved.values() if share is not None]
    device, state = ranks[0].environment["device"], ranks[0].device_state
    clocks = {"sm_clock_mhz": state.sm_clock_mhz, "power_capped_share": state.power_capped_share}
    used, denominators = utilization(cell, speed.get("model_tflops_per_rank"), device)
    extra: dict[str, Any] = {}  # of instruments of optional features
    for name in ranks[0].extra:
        of_ranks = [rank.extra[name] for rank in ranks]
        extra |= load(f"{INSTRUMENTS[name]}:samples_of")(of_ranks)
    return Summary(
        metrics=metrics
        | unmoved
        | used
        | {
            "compiled_graphs": ranks[0].compiled_graphs,
            "compile_seconds": _largest([rank.compile_seconds for rank in ranks]),
            "setup_seconds": max(rank.setup_seconds for rank in ranks),
            "window_energy_j": _total([rank.device_state.energy_j for rank in ranks]),
        },
        validity={
            "oversubscribed": _oversubscribed(cell, ranks),
            "throttled": _any([rank.device_state.throttled for rank in ranks]),
            "quota_throttled": _any([_is_held_back(rank) for rank in ranks]),
            "drifting": window.drifting,
            "uneven_steps": window.uneven,
            "uneven_steps_cause": window.uneven_cause,
            "short_window": ranks[0].cut_short,
            "unmoved_weights": max(moved) > UNMOVED if moved else None,
            "unattributed_bytes": _any([r.sent.by_purpose.get("unattributed") for r in ranks]),
            "steps_skipped": int(sum(ranks[0].skipped)),
            "steps_counted": window.steps,
            "warmup_steps_added": ranks[0].warmup_steps_added,
            "same_first_loss": cell.id_of_first_loss,
            "same_losses": cell.id_of_losses,
            "first_gradients": " ".join(map(repr, ranks[0].first_gradients)) or None,
            "loss_tolerance": max(
                part.relative_tolerance()
                for part in (cell.precision, cell.sharding, cell.optimizer)
            ),
            "gradient_tolerance": gradient_tolerance(cell),
        },
        environment=ranks[0].environment
        | denominators
        | {
            "nodes_used": ",".join(dict.fromkeys(r.environment["node"] for r in ranks)),
            "sent_bytes_reason": ranks[0].sent.reason or None,
            "activation_gib_reason": ranks[0].memory_reason or None,
        }
        | {name: value for name, value in clocks.items() if value is not None},
        samples={
            "step_time_ms": [[round(t, 4) for t in rank.step_times_ms] for rank in ranks],
            "skipped": ranks[0].skipped,
            "data_wait_ms": [[round(t, 4) for t in rank.data_waits_ms] for rank in ranks],
            "warm_up_steps": window.warmup_steps,
            "collectives": ranks[0].sent.by_collective,
        }
        | extra,
    )


def _unmoved(ranks: list[dict[str, list[float]]]) -> dict[str, float | None]:
    """Return the shares of tensors and of numbers that never moved, of those with a gradient on any rank."""
    total: dict[str, list[float]] = {}
    for name, counts in (item for rank in ranks for item in rank.items()):
        total[name] = [a + b for a, b in zip(total.get(name, [0.0, 0.0]), counts, strict=True)]
    tensors = [(given, still) for given, still in total.values() if given]
    if not tensors:
        return {"unmoved_tensor_share": None, "unmoved_weight_share": None}
    given, still = (sum(counts) for counts in zip(*tensors, strict=True))
    tensor_share = sum(given == still for given, still in tensors) / len(tensors)
    return {"unmoved_tensor_share": tensor_share, "unmoved_weight_share": still / given}


def gradient_tolerance(cell: CellSpec) -> float | None:
    """Return how far the sketch of the first gradients may lie from that of exact ones; None: anywhere.

    In float32 it is that of a loss. It is larger, by the root of that, in fewer digits, and where a model
    may have BatchNorm or kinks: it divides small numbers, and rounding moves some over a kink.
    """
    rounding = max(part.relative_tolerance() for part in (cell.precision, cell.sharding))
    reasons = (rounding > 1e-4) + cell.model.norms_over_batch
    return None if cell.precision.float8 or reasons > 1 else rounding ** (0.5 if reasons else 1)


def _any(values: Sequence[float | None]) -> bool | None:
    known = [value for value in values if value is not None]
    return any(known) if known else None


def _is_held_back(rank: RankSamples) -> bool | None:
    """Whether a CPU quota held a rank's control group back for more than `QUOTA_SHARE` of the window."""
    if rank.throttled_seconds is None:
        return None
    return rank.throttled_seconds > QUOTA_SHARE * sum(rank.step_times_ms[rank.warmup_steps :]) / 1e3


def _oversubscribed(cell: CellSpec, ranks: list[RankSamples]) -> bool:
    """Whether ranks share cores or devices: as planned, or since several "nodes" are one machine."""
    asked = cell.resources
    nodes: dict[str, set[str]] = {}
    for rank in ranks:
        nodes.setdefault(rank.machine, set()).add(rank.environment["node"])
    if asked.oversubscribed or any(len(names) > 1 for names in nodes.values()):
        return True
    threads = Counter(rank.machine for rank in ranks)
    cores = {rank.machine: rank.environment["host_cores"] for rank in ranks}
    return asked.device == "cpu" and any(
        threads[machine] * asked.threads_per_rank > cores[machine] for machine in threads
    )


def _sent(ranks: list[RankSamples]) -> dict[str, float | None]:
    columns: dict[str, float | None] = {}
    for purpose in get_args(Purpose):
        known = [r.sent.by_purpose[purpose] for r in ranks if purpose in r.sent.by_purpose]
        columns[f"{purpose}_bytes_per_step"] = float(np.mean(known)) if known else None
    return columns


def _losses(cell: CellSpec, ranks: list[RankSamples]) -> dict[str, float | None]:
    """Return losses after fixed numbers of steps, however many the machine took in the window."""
    mean = np.mean([rank.losses for rank in ranks], axis=0)
    first = min(cell.measurement.warmup_steps, len(mean) - 1)
    last = min(first + cell.measurement.least_steps, len(mean)) - 1
    # Until an update is skipped, these are losses after 0, 1 and 2 updates on the same images in all cells.
    alike = next((i + 1 for i, skipped in enumerate(ranks[0].skipped) if skipped), len(mean))
    early = {
        f"loss_step_{i + 1}": float(mean[i]) if i < min(alike, len(mean)) else None
        for i in range(3)
    }
    return {"loss_last": float(mean[last])} | early


def _largest(values: list[float | None]) -> float | None:
    return None if None in values else max(values)  # type: ignore[type-var]


def _total(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
