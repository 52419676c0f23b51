"""`vitsweep plan --search layouts`: which degrees, sharding and recomputation are fastest on a cluster."""

import time
from collections.abc import Sequence

from pandas import DataFrame
from rich.console import Console

from vitsweep.api.plan import machine_with
from vitsweep.cli.verbs import VERBS, Options
from vitsweep.composition.composer import Composer
from vitsweep.composition.overrides import key_of
from vitsweep.console import open_console
from vitsweep.errors import BadValueError, ExitCode
from vitsweep.extras.predict.columns import fastest_predicted
from vitsweep.extras.predict.layouts import SHARDINGS, Candidate, Choices, Found, search_layouts
from vitsweep.planning.closed_memory import RECOMPUTE
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.rates.profile import Profile, profile_named, profile_names
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.tables.formatting import count
from vitsweep.tables.render import TextTable

SHOWN = 10
IMAGES_PER_GPU = 32
"""Of a step, where the batch is not typed."""
SEARCHED = ("sharding", "tensor_parallel", "pipeline_parallel", "sequence_parallel", "memory")
"""Groups that the search chooses; so are `mesh.*` and `batch.accumulation_steps`."""


def parser() -> Options:
    """Return the parser of the search."""
    options = Options(VERBS["plan"])
    options.add_argument("--search", choices=["layouts"], required=True, help="what to search for")
    options.add_argument(
        "--hardware", required=True, help=f"one of {', '.join(profile_names())}, or a profile file"
    )
    options.flag("-m", "--multirun", help="means nothing here")
    options.add_argument(
        "overrides", nargs="*", metavar="override", help="model, batch, nodes, precision"
    )
    return options


def search(arguments: Sequence[str]) -> int:
    """Print the ten fastest layouts with the command of each; return the exit code.

    Raises:
        BadValueError: an override is wrong or is what the search chooses, or no layout fits.
    """
    asked = parser().read(arguments)
    hardware = profile_named(asked.hardware)
    _refuse_searched(asked.overrides)
    started = time.monotonic()
    overrides = [*asked.overrides, *_assumed(asked.overrides, hardware)]
    base, choices = _compose(overrides, hardware)
    found = search_layouts(base, choices, hardware)
    if not found.ranked:
        raise BadValueError(_nothing(found, hardware))
    _show(found, base, hardware, overrides, time.monotonic() - started, open_console())
    return ExitCode.ok


def _assumed(overrides: Sequence[str], hardware: Profile) -> list[str]:
    """Return choices for what was not typed: those of a large training instead of a small test."""
    typed = {key_of(text): text.partition("=")[2] for text in overrides}
    nodes = int(typed.get("resources.nodes", "1"))
    per_node = int(typed.get("resources.ranks_per_node", hardware["devices_per_node"]))
    choices = {
        "data": "synthetic",
        "precision": half_precision(hardware),
        "optimizer": "adamw_fused",
    }
    assumed = [f"{group}={choice}" for group, choice in choices.items() if group not in typed]
    if not {"batch", "batch.images_per_step"} & set(typed):
        assumed.append(f"batch.images_per_step={IMAGES_PER_GPU * nodes * per_node}")
    return assumed


def half_precision(hardware: Profile) -> str:
    """Return the choice of `precision` by which the device's fastest usual products are used."""
    if "bfloat16" in hardware.peak_tflops:
        return "bf16"
    return "O1" if "float16" in hardware.peak_tflops else "fp32"  # O1 is float16 on a GPU


def _refuse_searched(overrides: Sequence[str]) -> None:
    for text in overrides:
        key = key_of(text)
        if key in SEARCHED or key.startswith("mesh.") or key == "batch.accumulation_steps":
            raise BadValueError(
                f"`{text}` is what `--search layouts` chooses: leave it out, or plan this one layout with "
                "`python -m vitsweep plan`."
            )


def _compose(overrides: Sequence[str], hardware: Profile) -> tuple[CellSpec, Choices]:
    composer = Composer()
    machine = machine_with(hardware)

    def with_choice(*more: str) -> CellSpec:
        return plan_cell(composer.compose([*overrides, *more]), machine).spec

    base = with_choice()
    tensor, pipeline = ("none", "megatron"), ("none", "one_f_one_b")
    return base, Choices(
        sharding={n: with_choice(f"sharding={n}").sharding for n in SHARDINGS},
        tensor={n: with_choice(f"tensor_parallel={n}").tensor_parallel for n in tensor},
        pipeline={n: with_choice(f"pipeline_parallel={n}").pipeline_parallel for n in pipeline},
        sequence={
            n: with_choice(f"sequence_parallel={n}").sequence_parallel for n in ("none", "ulysses")
        },
        memory={n: with_choice(f"memory={n}").memory for n in RECOMPUTE},
    )


def _nothing(found: Found, hardware: Profile) -> str:
    if not found.too_large:
        return (
            f"None of {found.considered} layouts can run: `batch.images_per_step` does not split over the "
            "ranks of any. Use a multiple of `resources.nodes` x GPUs per node."
        )
    return (
        f"None of {found.too_large} layouts fits into the {hardware.usable_bytes / 2**30:.0f} GiB of "
        f"{hardware.title}: the smallest needs {found.least_memory_bytes / 2**30:.0f} GiB per GPU. Use more "
        "nodes, fewer images per step, or another `precision`."
    )


def _show(
    found: Found,
    base: CellSpec,
    hardware: Profile,
    overrides: Sequence[str],
    seconds: float,
    console: Console,
) -> None:
    resources = base.resources
    rows = [_row(candidate) for candidate in found.ranked[:SHOWN]]
    table = TextTable(
        DataFrame(rows).rename_axis("no.").rename(index=lambda n: n + 1).reset_index(),
        f"Layouts of {base.model.name}: {count(resources.nodes, 'node')} of "
        f"{resources.ranks_per_node} x {hardware.title}",
    )
    console.print(table)
    typed = " ".join(overrides)
    for number, candidate in enumerate(found.ranked[:SHOWN], 1):
        line = f"{number}. python -m vitsweep {typed} {' '.join(candidate.overrides)}"
        console.print(line, soft_wrap=True)
    best = found.ranked[0]
    console.print(
        f"{found.considered} layouts in {seconds:.0f} s: {found.invalid} invalid, {found.too_large} larger "
        f"than {hardware.usable_bytes / 2**30:.0f} GiB, {len(found.ranked)} ranked by their predicted "
        f"throughput. {fastest_predicted([(_described(c.cell), *c.interval) for c in found.ranked])}",
        soft_wrap=True,
    )
    for note in best.prediction.notes:
        console.print(note, soft_wrap=True)


def _row(candidate: Candidate) -> dict[str, str]:
    found = candidate.prediction
    low, high = candidate.interval
    waits = found.parts_ms["communication"] + found.parts_ms["bubble"] + found.parts_ms["launch"]
    return {
        "img/s": f"{candidate.images_per_second:,.0f}",
        "80 % range": f"{low:,.0f}-{high:,.0f}",
        "ms": f"{found.step_time_ms:,.0f}",
        "waits": f"{100 * waits / found.step_time_ms:.0f} %",
        "GiB": f"{candidate.memory_bytes / 2**30:.0f}",
        "layout": _described(candidate.cell),
        "memory": candidate.cell.memory.name,
    }


def _described(cell: CellSpec) -> str:
    """Return the sharding with its replicas x shards, then other degrees above 1: `hsdp 2x4, tensor 8`."""
    mesh = cell.mesh
    data = "x".join(str(degree) for degree in (mesh.replicate, mesh.shard) if degree > 1)
    others = {
        "ulysses": mesh.ulysses,
        "tensor": mesh.tensor,
        "pipeline": mesh.pipeline,
        "micro-batches": max(cell.batch.accumulation_steps, cell.pipeline_parallel.microbatches),
    }
    return ", ".join(
        [
            f"{cell.sharding.name} {data}".rstrip(),
            *(f"{name} {degree}" for name, degree in others.items() if degree > 1),
        ]
    )
