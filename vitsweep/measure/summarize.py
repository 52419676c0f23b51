"""From the samples of all ranks to the metrics of one run."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from vitsweep.collectives.primitives import Purpose
from vitsweep.errors import VitsweepError
from vitsweep.measure.communication import Collectives, SentBytes, transfer_and_wait_ms
from vitsweep.measure.device_monitor import DeviceState
from vitsweep.measure.utilization import throughput, utilization
from vitsweep.measure.window import summarize_window
from vitsweep.spec.cell_spec import CellSpec


@dataclass(kw_only=True)
class RankSamples:
    """What one rank measured.

    Attributes:
        step_times_ms: one per timed step, warm-up included.
        data_waits_ms: one per timed step, time in which the host waited for data.
        warmup_steps: timed steps before the window; the same on every rank.
        warmup_steps_added: how many of them because steps were still becoming faster.
        losses: mean loss over the rank's images, one per timed step.
        skipped: one per timed step, True where an overflow made the scaler skip the update.
        setup_seconds: from the start of the process to the first step.
        phases_ms: phase -> milliseconds, from instrumented steps.
        collectives: (name, milliseconds) of the collectives of one step.
        device_state: clock, power and throttling in the timed window.
        sent: bytes sent in one step.
        compiled_graphs: how many torch.compile made for the timed steps; None where unknown.
        compile_seconds: that it took for them; None where unknown.
        memory: memory columns of the record, GiB.
        memory_reason: why some of them are empty, or "".
        own_cpu_seconds: CPU time of the rank during the timed steps.
        environment: environment columns of the record.
        machine: equal for ranks that run on one kernel, whatever their nodes are called.
    """

    step_times_ms: list[float]
    data_waits_ms: list[float]
    warmup_steps: int
    warmup_steps_added: int
    losses: list[float]
    skipped: list[bool]
    setup_seconds: float
    phases_ms: dict[str, float]
    collectives: Collectives
    device_state: DeviceState
    sent: SentBytes
    compiled_graphs: int | None
    compile_seconds: float | None
    memory: dict[str, float | None]
    memory_reason: str
    own_cpu_seconds: float
    environment: dict[str, Any]
    machine: str


@dataclass(kw_only=True)
class Summary:
    """Metrics, validity and raw samples of a run, ready for its record."""

    metrics: dict[str, float | None]
    validity: dict[str, Any]
    environment: dict[str, Any]
    samples: dict[str, Any]


def summarize(cell: CellSpec, ranks: list[RankSamples], calibration: dict[str, float]) -> Summary:
    """Combine the ranks: the run takes as long as its slowest rank, memory is the worst rank's.

    Raises:
        VitsweepError: the ranks ran on different kinds of devices.
    """
    _refuse_mixed_devices(ranks)
    window = summarize_window(
        [rank.step_times_ms for rank in ranks],
        ranks[0].skipped,
        ranks[0].warmup_steps,
        [rank.data_waits_ms for rank in ranks],
    )
    step_time_ms = window.metrics.get("step_time_ms")
    speed = throughput(cell, step_time_ms) if step_time_ms else {}
    metrics = (
        speed
        | window.metrics
        | _phases(ranks)
        | _sent(ranks)
        | _memory(ranks)
        | _losses(cell, ranks)
    )
    device = ranks[0].environment["device"]
    used, denominators = utilization(cell, speed.get("model_tflops_per_rank"), device, calibration)
    return Summary(
        metrics=metrics
        | used
        | {
            "compiled_graphs": ranks[0].compiled_graphs,
            "compile_seconds": _largest([rank.compile_seconds for rank in ranks]),
            "setup_seconds": max(rank.setup_seconds for rank in ranks),
            "all_reduce_gb_per_s": calibration.get("all_reduce_gb_per_s"),
            "copy_gb_per_s": calibration.get("copy_gb_per_s"),
            "sm_clock_mhz_mean": _mean([rank.device_state.sm_clock_mhz for rank in ranks]),
            "power_w_mean": _mean([rank.device_state.power_w for rank in ranks]),
        },
        validity={
            "oversubscribed": _oversubscribed(cell, ranks),
            "throttled": _any([rank.device_state.throttled for rank in ranks]),
            "drifting": window.drifting,
            "uneven_steps": window.uneven,
            "uneven_steps_cause": window.uneven_cause,
            "steps_skipped": int(sum(ranks[0].skipped)),
            "steps_counted": window.steps,
            "warmup_steps_added": ranks[0].warmup_steps_added,
            "throughput_from": "window",
        },
        environment=ranks[0].environment
        | denominators
        | {
            "nodes_used": ",".join(dict.fromkeys(r.environment["node"] for r in ranks)),
            "device_state_reason": ranks[0].device_state.reason or None,
            "sent_bytes_reason": ranks[0].sent.reason or None,
            "activation_gib_reason": ranks[0].memory_reason or None,
        },
        samples={
            "step_time_ms": [[round(t, 4) for t in rank.step_times_ms] for rank in ranks],
            "skipped": ranks[0].skipped,
            "data_wait_ms": [[round(t, 4) for t in rank.data_waits_ms] for rank in ranks],
            "warm_up_steps": window.warmup_steps,
            "collectives": ranks[0].sent.by_collective,
        },
    )


def _refuse_mixed_devices(ranks: list[RankSamples]) -> None:
    devices = Counter(rank.environment["device"] for rank in ranks)
    if len(devices) > 1:
        listed = ", ".join(f"{count} on `{device}`" for device, count in devices.items())
        raise VitsweepError(
            f"The ranks of this run used different devices ({listed}): its numbers would be of no "
            "machine. Ask for nodes of one kind (on Slurm: `hydra.launcher.constraint`)."
        )


def _any(values: list[bool | None]) -> bool | None:
    known = [value for value in values if value is not None]
    return any(known) if known else None


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


def _phases(ranks: list[RankSamples]) -> dict[str, float | None]:
    names = ranks[0].phases_ms
    phases = {f"{name}_ms": max(rank.phases_ms[name] for rank in ranks) for name in names}
    transfer, wait = transfer_and_wait_ms([rank.collectives for rank in ranks])
    return phases | {"communication_ms": transfer, "communication_wait_ms": wait}


def _sent(ranks: list[RankSamples]) -> dict[str, float | None]:
    columns: dict[str, float | None] = {}
    for purpose in get_args(Purpose):
        known = [r.sent.by_purpose[purpose] for r in ranks if purpose in r.sent.by_purpose]
        columns[f"{purpose}_bytes_per_step"] = float(np.mean(known)) if known else None
        columns[f"{purpose}_bytes_per_step_max"] = max(known, default=None)
    return columns


def _memory(ranks: list[RankSamples]) -> dict[str, float | None]:
    values = {column: [rank.memory[column] for rank in ranks] for column in ranks[0].memory}
    return {c: None if None in v else max(v) for c, v in values.items()}  # type: ignore[type-var]


def _losses(cell: CellSpec, ranks: list[RankSamples]) -> dict[str, float | None]:
    """Return losses after fixed numbers of steps, however many the machine took in the window."""
    mean = np.mean([rank.losses for rank in ranks], axis=0)
    first = min(cell.measurement.warmup_steps, len(mean) - 1)
    last = min(first + cell.measurement.measured_steps, len(mean)) - 1
    return {"loss_first": float(mean[first]), "loss_last": float(mean[last])}


def _largest(values: list[float | None]) -> float | None:
    return None if None in values else max(values)  # type: ignore[type-var]


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
