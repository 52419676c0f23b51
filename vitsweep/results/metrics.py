"""Every measured column with its unit and definition, the headings of tables, and the validity flags.

Tables, charts, reports and the documentation read them from here.
"""

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal

from vitsweep.spec.cell_spec import GROUPS, GROUPS_WITH_NAME

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Metric:
    """One measured column of records and tables. Whatever a table does with a column follows from here.

    Attributes:
        column: name in CSV and parquet; the unit is part of it where it is not a pure number.
        unit: as written on an axis; "1" for ratios and counts.
        label: axis label without the unit.
        better: which direction is an improvement, or None where neither is.
        definition: how it is computed, in one line.
        follows: it is proportional to images/s, or to the time of a step; a table that adjusts
            throughput for blocks adjusts it as well.
        positive: zero or less is no measurement, and treated as missing.
        mean: over repetitions. Of geometric means the ratio is the mean ratio.
        spread: repetitions get a standard deviation and an interval of it.
        gated: it can be compared with a kept baseline.
        heading: of the column in printed tables; empty where they do not show it.
    """

    column: str
    unit: str
    label: str
    better: Literal["higher", "lower"] | None
    definition: str
    _: KW_ONLY
    follows: Literal["throughput", "step_time"] | None = None
    positive: bool = False
    mean: Literal["arithmetic", "geometric"] = "arithmetic"
    spread: bool = False
    gated: bool = True
    heading: str = ""

    @property
    def axis_label(self) -> str:
        """Label with its unit, for an axis or a table header."""
        return self.label if self.unit == "1" else f"{self.label} ({self.unit})"


_ALL = (
    Metric("images_per_second", "img/s", "Throughput, all ranks", "higher",
           "images of the timed window over all ranks / its elapsed time on the slowest rank; of a cell its "
           "level over its runs, free of the effects of blocks",
           follows="throughput", positive=True, mean="geometric", spread=True, heading="img/s"),
    Metric("images_per_second_per_rank", "img/s", "Throughput per rank", "higher",
           "images_per_second / ranks",
           follows="throughput", positive=True, mean="geometric"),
    Metric("tokens_per_second", "tokens/s", "Token throughput, all ranks", "higher",
           "images_per_second x tokens of one image",
           follows="throughput", positive=True, mean="geometric"),
    Metric("step_time_ms", "ms", "Step time", "lower",
           "elapsed time of the timed window on the slowest rank / its steps, without steps that the loss "
           "scaler skipped",
           follows="step_time", positive=True, mean="geometric", heading="step ms"),
    Metric("unadjusted_images_per_second", "img/s", "Throughput, median over runs", None,
           "median of images_per_second over the runs of a cell, without block adjustment; cells only"),
    Metric("data_wait_ms", "ms", "Waiting for data in the window", "lower",
           "time that the host waited for batches / steps of the window, slowest rank"),
    Metric("window_seconds", "s", "Timed window", None,
           "elapsed time of the counted steps on the slowest rank"),
    Metric("throughput_spread", "1", "Relative standard deviation of throughput", "lower",
           "standard deviation / mean of images_per_second over the runs of a cell; cells only",
           gated=False),
    Metric("speedup", "x", "Speedup over the baseline", "higher",
           "exp(mean over blocks of log(baseline step time / step time)), images per step equalised",
           positive=True, heading="speedup"),
    Metric("speedup_low", "x", "Speedup, lower end of the 95 % interval", "higher",
           "Student's t over blocks; empty below 3 blocks",
           positive=True, gated=False),
    Metric("speedup_high", "x", "Speedup, upper end of the 95 % interval", "higher",
           "Student's t over blocks; empty below 3 blocks",
           positive=True, gated=False),
    Metric("data_ms", "ms", "Waiting for data", "lower", "median instrumented step of the slowest rank"),
    Metric("forward_ms", "ms", "Forward", "lower",
           "median instrumented step of the slowest rank; of a pipeline all micro-batches"),
    Metric("backward_ms", "ms", "Backward", "lower",
           "median instrumented step of the slowest rank; contains the gradient exchange"),
    Metric("bubble_ms", "ms", "Pipeline bubble", "lower",
           "median instrumented step of the slowest rank; waiting for other stages"),
    Metric("optimizer_ms", "ms", "Optimizer step", "lower",
           "median instrumented step of the slowest rank; unscale, clip, update, zero_grad"),
    Metric("communication_ms", "ms", "Communication", "lower",
           "of one step's collectives, overlapped or not, by a profiler: from the arrival of the last rank "
           "to the median end over ranks; where ranks run different collectives, the mean of ranks, "
           "waiting included"),
    Metric("peak_allocated_gib", "GiB", "Peak allocated, worst rank", "lower",
           "torch.cuda.max_memory_allocated; empty on CPU"),
    Metric("peak_rss_gib", "GiB", "Peak resident memory, worst rank", "lower",
           "VmHWM of the process since the model was built; CPU"),
    Metric("peak_gib", "GiB", "Peak memory, worst rank", "lower",
           "peak_allocated_gib on a GPU, peak_rss_gib on CPU; made by the tables",
           heading="peak GiB"),
    Metric("parameter_gib", "GiB", "Parameters held, worst rank", "lower",
           "tensors that the rank holds between steps: shards where parameters are sharded"),
    Metric("gradient_gib", "GiB", "Gradients held, worst rank", "lower",
           "tensors that the rank holds before the update"),
    Metric("optimizer_state_gib", "GiB", "Optimizer state held, worst rank", "lower",
           "moments and float32 copies of parameters that the rank holds"),
    Metric("gathered_parameter_gib", "GiB", "Parameters gathered, worst rank", "lower",
           "beyond what the rank holds, at the peak of forward and backward; empty for compiled cells"),
    Metric("activation_gib", "GiB", "Activations, worst rank", "lower",
           "other tensors alive at the peak of forward and backward, by torch's tracker; empty for compiled "
           "cells"),
    Metric("parameter_bytes_per_step", "B", "Parameters sent per rank and step", "lower",
           "all-gathers and broadcasts of parameters, mean of ranks"),
    Metric("gradient_bytes_per_step", "B", "Gradients sent per rank and step", "lower",
           "all-reduce and reduce-scatter of gradients, mean of ranks"),
    Metric("optimizer_bytes_per_step", "B", "Sent by the optimizer per rank and step", "lower",
           "parts of matrices, to the rank that orthogonalizes them and back (Muon), mean of ranks"),
    Metric("activation_bytes_per_step", "B", "Activations sent per rank and step", "lower",
           "sequence, tensor and pipeline parallelism, mean of ranks"),
    Metric("unattributed_bytes_per_step", "B", "Sent for no stated purpose per rank and step", "lower",
           "collectives of neither data parallelism nor a method of vitsweep, without `sent_as`, mean of "
           "ranks"),
    Metric("num_parameters", "1", "Parameters of the model", None, "counted from the shape"),
    Metric("model_flops_per_image", "FLOP", "Model FLOPs of one image", None,
           "forward + backward from the shape, one multiply-add = 2, nothing recomputed; attention by "
           "unmasked pairs, linear attention by its states"),
    Metric("model_tflops_per_rank", "TFLOP/s", "Model TFLOP/s per rank", "higher",
           "model_flops_per_image x images_per_second_per_rank / 1e12",
           follows="throughput", heading="TFLOP/s per rank"),
    Metric("mfu", "1", "Model FLOPs utilisation", "higher",
           "model_tflops_per_rank / published dense peak of the device in the compute dtype",
           follows="throughput"),
    Metric("peak_tflops", "TFLOP/s", "Dense peak of the device", None,
           "published for the compute dtype; its source in peak_source"),
    Metric("epoch_hours_imagenet1k", "h", "Time of an ImageNet-1k epoch", "lower",
           "1,281,167 images / images_per_second / 3600",
           follows="step_time"),
    Metric("loss_last", "1", "Loss of the last measured step", None,
           "mean over ranks, of step number warmup_steps + fewest_steps (or measured_steps) - 1"),
    Metric("loss_step_1", "1", "Loss of the first step", None,
           "mean over ranks, before any update; compared with the baseline's in the same block"),
    Metric("loss_step_2", "1", "Loss of the second step", None,
           "mean over ranks, after one update; none where that was skipped by the loss scaler"),
    Metric("loss_step_3", "1", "Loss of the third step", None,
           "mean over ranks, after two updates; none where one was skipped by the loss scaler"),
    Metric("unmoved_tensor_share", "1", "Parameters that never moved", "lower",
           "tensors that no timed update changed by a bit / tensors with a gradient in the first step; as "
           "the optimizer keeps them, up to 4,096 numbers of each"),
    Metric("unmoved_weight_share", "1", "Weights that never moved", "lower",
           "the same of single numbers"),
    Metric("accuracy_top1", "1", "Top-1 accuracy", "higher",
           "held-out images, each counted once; only where task=train",
           spread=True, heading="top-1"),
    Metric("accuracy_top5", "1", "Top-5 accuracy", "higher",
           "held-out images whose label is among the five largest logits; only where task=train"),
    Metric("accuracy_top1_raw", "1", "Top-1 accuracy without averaging", "higher",
           "of the last weights themselves; only where averaging keeps others too"),
    Metric("held_out_loss", "1", "Loss on held-out images", "lower",
           "each image counted once; only where task=train, of objectives that are scored by it",
           spread=True, heading="held-out loss"),
    Metric("probe_top1", "1", "Top-1 accuracy of a linear probe", "higher",
           "ridge regression on frozen features of held-out images, by others of them; only where "
           "task=train, of objectives that read no labels",
           spread=True, heading="probe top-1"),
    Metric("feature_spread", "1", "Spread of features", "higher",
           "mean square distance of held-out images' features, of length 1, from their mean; 0: all equal"),
    Metric("prototype_information", "1", "Information of prototypes about an image", "higher",
           "(entropy of the mean shares - mean entropy of shares) / log of their number, held-out images"),
    Metric("train_seconds", "s", "Training time", "lower", "epochs of task=train, without evaluation"),
    Metric("seconds_to_target", "s", "Training time to the target accuracy", "lower",
           "train_seconds at the first evaluation with accuracy_top1 >= task.target_accuracy; else empty",
           mean="geometric", spread=True, heading="s to target"),
    Metric("epochs_to_target", "1", "Epochs to the target accuracy", "lower",
           "epochs trained at that evaluation"),
    Metric("setup_seconds", "s", "Set-up time of a run", "lower",
           "from process start to the first step: imports, rendezvous, model, proof"),
    Metric("compiled_graphs", "1", "Graphs compiled", None,
           "by torch.compile for the timed steps, first rank; each part of a cut graph counts"),
    Metric("compile_seconds", "s", "Compiling", "lower",
           "by torch.compile before the window, forward and backward, slowest rank; of a cell the median of "
           "its runs after the first, which find kernels in the cache"),
    Metric("first_compile_seconds", "s", "Compiling in the first run", "lower",
           "compile_seconds of a cell's first run, cold unless an earlier sweep left kernels in the cache"),
    Metric("window_energy_j", "J", "Energy of all devices in the window", None,
           "NVML's energy counter, all ranks; empty on a CPU, on GPUs before Volta and on MIG slices"),
)  # fmt: skip

GONE = frozenset(
    "step_time_median_ms step_time_p95_ms step_time_mean_over_median rank_skew_ms peak_reserved_gib "
    "communication_wait_ms loss_first sm_clock_mhz_mean power_w_mean parameter_bytes_per_step_max "
    "gradient_bytes_per_step_max activation_bytes_per_step_max unattributed_bytes_per_step_max hfu "
    "train_flops_share kept_accuracy_top1 kept_epoch mfu_of_measured_peak all_reduce_gb_per_s "
    "copy_gb_per_s cells_at_a_time huge_pages".split()
)
"""Columns of records of before that no table has any more."""

METRICS: dict[str, Metric] = {metric.column: metric for metric in _ALL}
"""Column -> definition, in the order of the record."""


@dataclass(frozen=True)
class Flag:
    """A validity flag: a column that says what limits the numbers of a row.

    Attributes:
        column: name in the record.
        caption: what was measured, for the line below a chart and the footnote of a table.
        least_share: a cell has the flag where more than this share of its runs have it. Warm-up shows
            in every run, a passing disturbance in one.
    """

    column: str
    caption: str
    least_share: float = 0.0


_FLAGS = (
    Flag("oversubscribed", "ranks shared CPU cores, so there is no scaling efficiency"),
    Flag("shared_device", "other processes used the device"),
    Flag("throttled", "clocks were throttled"),
    Flag("quota_throttled", "the CPU quota of the control group held ranks back"),
    Flag("drifting", "step times drifted within a run", 0.5),
    Flag("uneven_steps", "a few slow steps made up much of the time", 0.5),
    Flag("short_window", "timing stopped at its time limit, with fewer steps than asked for"),
    Flag(
        "unmoved_weights",
        "more than 1 % of the weights with a gradient did not change while timed (small updates are "
        "rounded away): training may not converge",
    ),
    Flag("unattributed_bytes", "collectives of your own sent bytes that belong to no technique"),
    Flag(
        "collapsed",
        "all images have nearly the same features, or the same prototypes: nothing is learned",
    ),
)

FLAGS: dict[str, Flag] = {flag.column: flag for flag in _FLAGS}
"""Column -> flag, in the order of the record."""


Type = Literal["int64", "double", "bool", "string"]
"""Of a column in parquet; each can be missing."""
Kind = Literal["head", "run", "spec", "comparison", "validity", "environment", "table"]


@dataclass(frozen=True)
class Column:
    """A column of records or tables that is no metric.

    Attributes:
        name: in CSV and parquet.
        kind: `head` (which cell, how it ended), `run` (of runs only), `spec` (a size or seed that is
            set), `comparison` (with the baseline), `validity`, `environment` (where and how it was
            measured), `table` (added by tables for their readers).
        numbers: it holds numbers, which are checked.
        positive: zero or less is missing.
        missing: what stands there in a table without this column.
        noun: of a column shown as a count, `8 ranks`.
        heading: of the column in printed tables; empty where they do not show it.
        type: in parquet.
    """

    name: str
    kind: Kind
    _: KW_ONLY
    type: Type = "string"
    numbers: bool = False
    positive: bool = False
    missing: str | None = None
    noun: str = ""
    heading: str = ""


def _columns(kind: Kind, names: str, **properties: Any) -> list[Column]:
    """Return columns named `text`, or `number:double` where they are no text."""
    parts = [name.split(":") for name in names.split()]
    types: list[Any] = [(*of, "string")[0] for _, *of in parts]
    named = zip(parts, types, strict=True)
    return [Column(name, kind, type=of, **properties) for (name, *_), of in named]


_COLUMNS = (
    *_columns("head", "schema_version:int64 cell_id"),
    *_columns("head", "sweep", missing=""),
    *_columns("head", "status"),
    *_columns("head", "reason", missing=""),
    *_columns("head", "attempt:int64 failed_rank:int64"),
    *_columns("head", "blocks:int64", numbers=True, heading="blocks"),
    *_columns("run", "run_id block position:int64"),
    *_columns("spec", "half_dtype"),
    *_columns("spec", "images_per_step:int64", numbers=True, positive=True, noun="image"),
    *_columns("spec", "accumulation_steps:int64", numbers=True, noun="accumulation step"),
    *_columns("spec", "resolution_px:int64", numbers=True),
    *_columns("spec", "num_tokens:int64", numbers=True, noun="token"),
    *_columns("spec", "nodes:int64", numbers=True, noun="node"),
    *_columns("spec", "ranks_per_node:int64", numbers=True),
    *_columns("spec", "world_size:int64", numbers=True, positive=True, noun="rank"),
    *_columns("spec", "seed:int64"),
    *_columns("comparison", "speedup:double speedup_low:double speedup_high:double"),
    *_columns("comparison", "claim", missing=""),
    *_columns(
        "comparison",
        "p_value:double p_holm:double claim_low:double claim_high:double family_size:int64 "
        "num_pairs:int64 block_noise:double",
        numbers=True,
    ),
    *_columns("comparison", "baseline_cell_id"),
    *_columns("comparison", "speedup_note", missing=""),
    *_columns("validity", " ".join(f"{flag}:bool" for flag in FLAGS)),
    *_columns(
        "validity",
        "uneven_steps_cause proved steps_skipped:int64 steps_counted:int64 warmup_steps_added:int64 "
        "same_first_loss same_losses first_gradients",
    ),
    *_columns("validity", "loss_tolerance:double gradient_tolerance:double", numbers=True),
    *_columns(
        "environment",
        "launcher git_commit git_dirty:bool code_hash device_type",
    ),
    *_columns("environment", "device", missing=""),
    *_columns(
        "environment",
        "torch cuda nccl driver cpu cpu_half_precision python host host_cores:int64 host_allocator "
        "cores_allowed:int64 node nodes_used slurm_job_id peak_source compute_dtype flops_source "
        "started_at run_seconds:double queued_s:double resumed purpose any_look:bool "
        "sm_clock_mhz:double power_capped_share:double",
    ),
    *_columns("table", "cell name is_baseline:bool log_ratio:double damaged_runs:int64"),
    *_columns("table", "replicates:int64", heading="replicates"),
)

COLUMNS: dict[str, Column] = {column.name: column for column in _COLUMNS}
"""Name -> column that is no metric, in the order of a table. Speedups are metrics as well."""

_HELD: Mapping[Type, tuple[type, ...]] = {
    "bool": (bool, type(None)),
    "int64": (int, float, type(None)),
    "double": (int, float, type(None)),
}
_VALUES = {name: _HELD[column.type] for name, column in COLUMNS.items() if column.type in _HELD}
_VALUES |= dict.fromkeys(METRICS, _HELD["double"])
_GROUPED = {*COLUMNS, *GROUPS, *GROUPS_WITH_NAME}
OF_TABLES = frozenset(c.name for c in _COLUMNS if c.kind in ("comparison", "table")) | {"blocks"}
"""Columns that tables compute; no record has them."""


def misfits(row: Mapping[str, Any]) -> list[str]:
    """Return the columns of a row, or of a part of one, with a value that no table can hold or group by."""
    wrong = {key for key in row.keys() & _VALUES.keys() if type(row[key]) not in _VALUES[key]}
    wrong |= {key for key in row.keys() & _GROUPED if type(row[key]) in (dict, list)}
    return sorted(wrong)


Metrics = Mapping[str, Metric]


def own_metrics(table: "DataFrame") -> dict[str, Metric]:
    """Return the metrics of the user's that a table holds; its attribute `metrics` defines them."""
    own: dict[str, list[Any]] = table.attrs.get("metrics", {})
    return {column: Metric(column, *definition) for column, definition in own.items()}


def known_metrics(table: "DataFrame") -> Metrics:
    """Return `METRICS` and the metrics of the user's that a table holds."""
    return METRICS | own_metrics(table)


def columns(kind: Kind) -> list[str]:
    """Return the names of a kind of column, in the order of a table."""
    return [name for name, column in COLUMNS.items() if column.kind == kind]


def metrics_with(**properties: Any) -> list[str]:
    """Return the metrics that have all of these properties, `metrics_with(follows="step_time")`."""
    return [
        name
        for name, metric in METRICS.items()
        if all(getattr(metric, key) == value for key, value in properties.items())
    ]


def heading(column: str) -> str:
    """Return how printed tables head a column."""
    known = METRICS.get(column) or COLUMNS[column]
    return known.heading


def headings(table: "DataFrame | None" = None) -> dict[str, str]:
    """Return heading of printed tables -> column; the user's metrics are headed by label and unit."""
    shown = {m.heading: m.column for m in METRICS.values() if m.heading}
    shown |= {c.heading: c.name for c in COLUMNS.values() if c.heading}
    own = {} if table is None else own_metrics(table)
    return shown | {metric.axis_label: column for column, metric in own.items()}


RESERVED = frozenset(
    (*COLUMNS, *GROUPS, *GROUPS_WITH_NAME, *GONE,
     "spec", "metrics", "validity", "environment", "samples")
)  # fmt: skip
"""Names that a column of a user's cannot have, besides those of metrics."""
RESERVED_PATTERN = re.compile(r"predicted_.*|.*_reason")
"""Columns that stand next to another one."""
