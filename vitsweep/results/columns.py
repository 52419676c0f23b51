"""The columns of records and tables that are no metrics, by kind."""

import re

from vitsweep.results.metrics import FLAGS
from vitsweep.spec.flatten import GROUPS_WITH_NAME
from vitsweep.spec.technique import TECHNIQUE_GROUPS

HEAD = (
    "schema_version",
    "cell_id",
    "sweep",
    "status",
    "reason",
    "attempt",
    "failed_rank",
    "blocks",
)
RUN_ONLY = ("run_id", "block", "position")
PLAIN_SPEC = (
    "half_dtype",
    "images_per_step",
    "accumulation_steps",
    "resolution_px",
    "num_tokens",
    "nodes",
    "ranks_per_node",
    "world_size",
    "seed",
)
COMPARISON = (
    "speedup",
    "speedup_low",
    "speedup_high",
    "claim",
    "p_value",
    "p_holm",
    "claim_low",
    "claim_high",
    "family_size",
    "selection_adjusted_speedup",
    "num_pairs",
    "baseline_cell_id",
    "speedup_note",
)
VALIDITY = (
    *FLAGS,
    "uneven_steps_cause",
    "throughput_from",
    "proved",
    "steps_skipped",
    "steps_counted",
    "warmup_steps_added",
)
ENVIRONMENT = (
    "launcher", "cells_at_a_time", "git_commit", "git_dirty", "code_hash", "device_type", "device",
    "torch", "cuda", "nccl", "driver", "cpu", "cpu_half_precision", "python", "host", "host_cores",
    "host_allocator", "cores_allowed", "huge_pages", "node", "nodes_used", "slurm_job_id",
    "peak_source", "compute_dtype", "flops_source", "started_at", "run_seconds", "queued_s",
    "resumed", "schedule_epochs",
)  # fmt: skip
"""Columns of a record that tell where and how it was made."""
MADE_BY_TABLES = ("cell", "name", "is_baseline", "log_ratio")
"""Columns that tables add for their readers."""

RESERVED = frozenset(
    (
        *HEAD, *RUN_ONLY, *TECHNIQUE_GROUPS, *GROUPS_WITH_NAME, *PLAIN_SPEC, *COMPARISON, *VALIDITY,
        *ENVIRONMENT, *MADE_BY_TABLES, "spec", "metrics", "validity", "environment", "samples",
    )
)  # fmt: skip
"""Names that a column of a user's cannot have, beside those of metrics."""
RESERVED_PATTERN = re.compile(r"predicted_.*|.*_reason")
"""Columns that stand beside another one."""
