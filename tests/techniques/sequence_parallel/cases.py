"""Cells in float64 under SGD, and the worlds that they can share."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.cells import TINY, entry
from tests.ranks import on_ranks
from vitsweep.spec.cell_spec import CellSpec

EXACT = (
    "precision.dtype=float64",
    "optimizer=sgd_loop",
    "optimizer.learning_rate=0.2",
    "batch.images_per_step=8",
)
VIDEO = ("model=video_vit_nano", "data=moving_digits", "data.num_frames=6", "model.depth=4")
AXIAL = ("model=axial_vit_nano", "batch.resolution_px=9", "model.depth=3")


def cell(ranks: int, *overrides: str) -> CellSpec:
    """A tiny exact cell; 17 tokens, 6 x 16 in a video, 9 x 9 in an axial ViT, so that much is odd."""
    models = [o for o in overrides if "=" in o and o.split("=")[0] in ("model", "data")]
    rest = [o for o in overrides if o not in models]
    exact = EXACT[1:] if any(o.startswith("precision=") for o in rest) else EXACT
    found = entry(*models, *TINY, *exact, f"resources.ranks_per_node={ranks}", *rest)
    assert not found.reasons, found.reasons
    return found.spec


def answers(
    function: Callable[..., Any], cells: Sequence[CellSpec], folder: Path
) -> list[tuple[str, Any]]:
    """Run `function(world, cells)` on the ranks of each mesh; return (choices, rank 0's answer)."""
    meshes: dict[object, list[CellSpec]] = {}
    for each in cells:
        meshes.setdefault(each.mesh, []).append(each)
    found = []
    for sharing in meshes.values():
        ranks = sharing[0].mesh.world_size
        got = on_ranks(ranks, function, sharing[0], sharing, folder=folder)[0]
        found += [(names(c), answer) for c, answer in zip(sharing, got, strict=True)]
    return found


def names(cell: CellSpec) -> str:
    """The choices by which cells of these tests differ."""
    groups = ("sequence_parallel", "tensor_parallel", "pipeline_parallel", "sharding", "memory")
    chosen = [getattr(cell, group).name for group in (*groups, "attention", "model")]
    return f"{' '.join(chosen)} {cell.mesh}"
