"""The columns of the record by kind, the spec columns that vary, and the order of known choices."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame, Series, factorize

from vitsweep.results.columns import COMPARISON, HEAD, PLAIN_SPEC, RUN_ONLY, VALIDITY
from vitsweep.results.metrics import METRICS
from vitsweep.spec.technique import TECHNIQUE_GROUPS

CHOICES = (*TECHNIQUE_GROUPS, "model", "data", "task", "recipe", "batch", "measurement")
SET_FIELDS = ("resolution_px", *(f"{group}." for group in (*TECHNIQUE_GROUPS, "model")))
"""Spec columns that a user sets, besides the choices of groups."""
FROM_DATA = ("model.frames", "model.in_channels", "model.num_classes")
"""Columns of those groups that are taken from the data, not set by a user."""
BOOKKEEPING = ("measurement",)
"""Spec columns that change how precisely a cell is measured, not what is run."""


def spec_columns(table: DataFrame) -> list[str]:
    """Return the columns of the spec: choices first, then numbers, then fields."""
    named = [c for c in (*CHOICES, *PLAIN_SPEC) if c in table]
    return named + [str(c) for c in table if "." in str(c)]


def metric_columns(table: DataFrame) -> list[str]:
    """Return the measured columns in the order of `METRICS`."""
    return [c for c in METRICS if c in table]


def predicted_columns(table: DataFrame) -> list[str]:
    """Return the columns that were predicted before the run: `predicted_<metric>`."""
    return [str(c) for c in table if str(c).startswith("predicted_")]


def environment_columns(table: DataFrame) -> list[str]:
    """Return the columns that are neither head, spec, metric, prediction, comparison nor validity."""
    measured = {*METRICS, *predicted_columns(table), *COMPARISON, *VALIDITY}
    other = {*HEAD, *RUN_ONLY, *spec_columns(table), *measured}
    return [str(c) for c in table if c not in other]


def varying(table: DataFrame) -> list[str]:
    """Return the spec columns that distinguish the cells: the choices that vary, then other columns.

    A column determined by the choices (`precision.master_weights` by `precision`) is left out, and
    so is a size determined by the columns before it (`num_tokens` by `resolution_px`). Fields of
    techniques and models, and the resolution, are kept also where they vary together (a learning
    rate and a weight decay): the table cannot know which of them made the difference.
    """
    columns = [c for c in _sizes_first(spec_columns(table)) if c not in BOOKKEEPING]
    different = [c for c in columns if _varies(table[c])]
    codes = {c: factorize(v)[0] for c, v in comparable(table[different]).items()}
    choices = [c for c in different if c in CHOICES]
    kept = list(choices)
    one_group = np.zeros(len(table), dtype=np.int64)
    by_choices = by_kept = _grouped(one_group, *(codes[c] for c in choices))
    for column in different[len(choices) :]:
        was_set = column.startswith(SET_FIELDS) and column not in FROM_DATA
        if not _follows(by_choices if was_set else by_kept, codes[column]):
            kept.append(column)
            by_kept = _grouped(by_kept, codes[column])
    return kept


def _grouped(groups: NDArray[np.int64], *columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Split numbered groups of rows by the codes of further columns; return the new numbers."""
    for codes in columns:
        _, groups = np.unique(groups * (codes.max() + 1) + codes, return_inverse=True)
    return groups


def _follows(groups: NDArray[np.int64], codes: NDArray[np.int64]) -> bool:
    """Return whether rows of the same group have the same code."""
    return bool(_grouped(groups, codes).max() == groups.max())


def comparable(table: DataFrame) -> DataFrame:
    """Return every value as text, missing ones as empty text, so that rows can be compared."""
    return table.astype(object).where(table.notna(), "").astype(str)


def _varies(values: Series) -> bool:
    """Return whether a column has several values, compared as text since lists cannot be hashed.

    A missing field counts as a value (fp32 has no loss scale); a missing choice is unknown.
    """
    known = values.notna()
    missing_counts = values.name not in CHOICES and not known.all()
    return len(set(map(str, values[known].tolist()))) + missing_counts > 1


def _sizes_first(columns: list[str]) -> list[str]:
    """Put `world_size` before `nodes` and `ranks_per_node`, so that it is the one that is kept."""
    return sorted(columns, key=lambda c: (c not in CHOICES, c != "world_size"))


ORDER: dict[str, str] = {
    "precision": "fp32 O1 O2 O3 bf16 tf32 bf16_params bf16_masters fp8 O0",
    "sharding": "ddp fsdp zero1 zero2 hsdp none",
    "optimizer": "adamw_loop adamw_foreach adamw_fused adamw_contiguous adamw_apex adamw_8bit adamw_4bit "
    "adamw_bf16_state adamw_stochastic lion muon sgd_loop sgd_foreach sgd_fused sgd_contiguous",
    "layout": "batch_first batch_second",
    "classifier": "token pooled",
    "attention": "sdpa_auto mha_module sdpa_math sdpa_flash sdpa_efficient sdpa_cudnn sdpa_cudnn_first "
    "flex linear "
    "sdpa_causal",
    "sequence_parallel": "none ulysses ring dsp usp lasp lasp2 megatron_sp lss segment_local",
    "tensor_parallel": "none megatron",
    "pipeline_parallel": "none gpipe one_f_one_b interleaved",
    "memory": "keep_all recompute_blocks recompute_selected budget offload_activations",
    "compilation": "eager compile_blocks compile_model cuda_graphs",
    "loader": "workers threads decoded_cache",
    "runtime": "plain gc_automatic gc_scheduled bind_cores bind_numa jemalloc tcmalloc huge_pages "
    "expandable_segments",
    "vit_block": "plain drop_samples parallel",
    "tokens": "all drop registers",
    "averaging": "none ema",
    "schedule": "constant progressive",
    "model": "vit_nano vit_tiny vit_small vit_base vit_large vit_huge_16 vit_huge_14 vit_giant_14 "
    "vit_10b dinov2_small dinov2_base dinov2_large dinov2_giant dinov3_small dinov3_small_plus "
    "dinov3_base dinov3_large dinov3_huge_plus "
    "axial_vit_nano axial_vit_base video_vit_nano video_vit_720m video_vit_3b "
    "resnet_50 resnet_nano module timm transformers",
    "batch": "base blog_560 blog_384_256px",
    "status": "measured out_of_memory diverged wrong timed_out preempted killed failed invalid",
}
"""Order of the choices of a group in tables and colours: the plain choice first."""


def in_menu_order(group: str, choices: Iterable[str]) -> list[str]:
    """Return the choices in the order of `ORDER`; unknown ones follow, by name."""
    known = ORDER.get(group, "").split()
    place = {choice: i for i, choice in enumerate(known)}
    return sorted(set(choices), key=lambda c: (place.get(c, len(known)), c))
