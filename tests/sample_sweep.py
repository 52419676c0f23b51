"""Generated sweeps with known answers: speedups are products of factors, noise is 1 %."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from pandas import DataFrame

from tests.builders import from_runs, run
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.tables.cells import cells
from vitsweep.tables.load import tidy
from vitsweep.tables.sweep_tables import SweepTables

BLOCKS = 5
FACTORS = {
    ("precision", "O1"): 1.30,
    ("precision", "O3"): 1.60,
    ("sharding", "fsdp"): 0.96,
    ("optimizer", "adamw_foreach"): 1.08,
    ("classifier", "pooled"): 1.01,
    ("layout", "batch_second"): 1.00,
    ("batch", "blog_560"): 1.05,
    ("batch", "blog_384_256px"): 1.15,
}
TOGETHER = {
    "precision": "O1",
    "sharding": "fsdp",
    "optimizer": "adamw_foreach",
    "classifier": "pooled",
}
BATCHES = {"blog_560": (560, 8, 17), "blog_384_256px": (384, 16, 65), "base": (64, 8, 17)}
METHODS = {
    "none": (1.0, 2000),
    "ulysses": (1.9, 9000),
    "ring": (1.5, 9000),
    "dsp": (2.2, 20000),
    "lasp": (2.0, 40000),
}


def speedups(generator: np.random.Generator) -> Iterator[RunRecord]:
    """Techniques alone, cumulative, all together at the blog's batches, a failed and a killed cell."""
    alone: list[dict[str, str]] = [{g: c} for g, c in FACTORS if g != "batch"]
    groups = list(TOGETHER.items())
    cumulative = [dict(groups[:n]) for n in range(2, len(groups) + 1)]
    together = [TOGETHER | {"batch": b} for b in ("blog_560", "blog_384_256px")]
    fullest = TOGETHER | {"precision": "O3", "batch": "blog_384_256px"}
    for choices in [{}, *alone, *cumulative, *together, fullest]:
        yield from measured(generator, choices)
    yield died({"attention": "sdpa_flash"}, Status.killed, "rank 1 was ended by SIGKILL.")
    yield died(
        {"memory": "recompute_blocks"}, Status.wrong, "the loss differs by 3 % after 4 steps."
    )


def scaling(generator: np.random.Generator) -> Iterator[RunRecord]:
    """DDP and everything together on 1 to 8 ranks, images of a step fixed and images of a rank fixed."""
    for choices in ({}, TOGETHER):
        for world in (1, 2, 4, 8):
            for images in sorted({512, 64 * world}):
                yield from measured(generator, choices, world=world, images=images)


def sequences(generator: np.random.Generator) -> Iterator[RunRecord]:
    """Sequence-parallel methods on 8 ranks over the length of the sequence, until memory ends."""
    for method, (factor, longest) in METHODS.items():
        for tokens in (1024, 2048, 4096, 8192, 16384):
            choices: dict[str, Any] = {"sequence_parallel": method, "num_tokens": tokens}
            choices |= {
                "resolution_px": 16 * int(tokens**0.5),
                "mesh.ulysses": 8 if method == "ulysses" else 1,
            }
            choices |= {
                "mesh.ring": 8 if method == "ring" else 1,
                "mesh.sequence": 8 if method in ("dsp", "lasp") else 1,
            }
            if tokens > longest:
                size = {"world_size": 8, "images_per_step": 8}
                yield died(choices, Status.out_of_memory, "rank 0 asked for 9.1 GiB.", **size)
            else:
                speed = factor / (tokens / 1024) ** (1.0 if method == "lasp" else 1.4)
                yield from measured(generator, choices, world=8, images=8, speed=20 * speed)


def measured(
    generator: np.random.Generator,
    choices: dict[str, Any],
    world: int = 2,
    images: int | None = None,
    speed: float | None = None,
) -> Iterator[RunRecord]:
    """Five blocks of one cell."""
    batch_images, pixels, tokens = BATCHES[choices.get("batch", "base")]
    spec = {
        "images_per_step": images or batch_images,
        "resolution_px": pixels,
        "num_tokens": tokens,
    }
    spec |= choices | {"world_size": world, "ranks_per_node": world}
    factor = float(np.prod([FACTORS.get((g, str(c)), 1.0) for g, c in choices.items()]))
    pace = speed or 50 * world * factor * 0.95 ** np.log2(world)
    for block in range(BLOCKS):
        drift = 1 + 0.1 * np.sin(block)  # what differs between blocks and cancels within one
        rate = pace * drift * np.exp(generator.normal(0, 0.01))
        step = 1000 * spec["images_per_step"] / rate
        yield run(
            cell_name(spec), f"b{block}", rate, minute=block, metrics=shares(step, spec),
            validity={"oversubscribed": world > 2}, **spec,
        )  # fmt: skip


def shares(step_ms: float, spec: dict[str, Any]) -> dict[str, float | None]:
    """Phases, memory and bytes in round proportions."""
    parallel = spec.get("sequence_parallel", "none") != "none"
    return {
        "data_ms": 0.02 * step_ms,
        "forward_ms": 0.3 * step_ms,
        "backward_ms": 0.58 * step_ms,
        "optimizer_ms": 0.1 * step_ms / (4 if "foreach" in str(spec.get("optimizer")) else 1),
        "communication_ms": 0.1 * step_ms,
        "peak_rss_gib": (0.7 if spec.get("sharding") == "fsdp" else 1.0) * spec["num_tokens"] / 1024
        + 0.5,
        "tokens_per_second": 1000 * spec["images_per_step"] * spec["num_tokens"] / step_ms,
        "gradient_bytes_per_step": 4.0e6,
        "parameter_bytes_per_step": 8.0e6 if spec.get("sharding") == "fsdp" else 0.0,
        "activation_bytes_per_step": 3.0e3 * spec["num_tokens"] if parallel else 0.0,
        "model_tflops_per_rank": 0.02,
        "accuracy_top1": 0.96 - 0.01 * (spec.get("precision") == "O3"),
    }


def died(choices: dict[str, Any], status: Status, reason: str, **size: int) -> RunRecord:
    """A cell that ended without a measurement."""
    spec = {"world_size": 2, "ranks_per_node": size.get("world_size", 2)} | choices | size
    return run(cell_name(spec), "b0", status=status, reason=reason, **spec)


def cell_name(spec: dict[str, Any]) -> str:
    """A readable cell id."""
    groups = (
        "precision",
        "sharding",
        "optimizer",
        "classifier",
        "layout",
        "batch",
        "attention",
        "memory",
    )
    parts = [spec.get(g) for g in (*groups, "sequence_parallel")]
    size = [f"{spec.get(k, '')}" for k in ("world_size", "images_per_step", "num_tokens")]
    return "-".join([p for p in parts if p] + size)


def baselines_of(name: str, records: list[RunRecord]) -> dict[str, str | None]:
    """The baseline of a cell is the plain cell of its own size; of `speedups` the one plain cell."""
    found: dict[str, str | None] = {}
    for record in records:
        size = {k: record.spec[k] for k in ("world_size", "images_per_step", "num_tokens")}
        method = {"sequence_parallel": "none"} if name == "sequences" else {}
        found[record.cell_id] = BASE if name == "speedups" else cell_name(size | method)
    return found


def write(folder: Path, records: list[RunRecord]) -> Store:
    """Write a sweep folder."""
    store = Store(folder).create()
    for record in records:
        store.save_run(record)
    command = f"python -m vitsweep -m +sweep={folder.name}"
    store.append_command({"baselines": baselines_of(folder.name, records), "command": command})
    return store


BASE = cell_name({"world_size": 2, "images_per_step": 64, "num_tokens": 17})
KINDS = {"speedups": speedups, "scaling": scaling, "sequences": sequences}


def records_of(name: str) -> list[RunRecord]:
    """The same records on every call."""
    return list(KINDS[name](np.random.default_rng(list(KINDS).index(name))))


@cache
def sweep(name: str) -> SweepTables:
    """One of the three sweeps, without a folder."""
    records = records_of(name)
    runs, baselines = DataFrame([r.row() for r in records]), baselines_of(name, records)
    return from_runs(tidy(runs), baselines, tidy(cells(runs, baselines)))


def write_all(folder: Path) -> dict[str, Store]:
    """Write the three sweeps the notebooks read."""
    return {name: write(folder / name, records_of(name)) for name in KINDS}
