"""Reasons for refusing a cell that several data sets share."""

from collections.abc import Iterator
from typing import Literal

from vitsweep.spec.cell_spec import CellSpec


def head_conflicts(cell: CellSpec, head: Literal["classify", "dense"]) -> Iterator[str]:
    """Refuse a head that does not fit the targets: `classify` for labels, `dense` for fields."""
    if cell.model.head != head:
        has = "one label per image" if head == "classify" else "a target field per image"
        yield (
            f"`model.head={cell.model.head}` does not fit `data={cell.data.name}`, "
            f"which has {has}: use `model.head={head}`."
        )


def image_count_conflicts(
    cell: CellSpec, num_train: int, num_test: int, more: str
) -> Iterator[str]:
    """Refuse data with less than one step per epoch, or fewer test images than replicas.

    Args:
        cell: the cell.
        num_train: training images, at least; exact where below `cell.images_per_step`.
        num_test: held-out images, at least; exact where below the number of replicas.
        more: what to change in the data to get more images, as typed.
    """
    if num_train < cell.images_per_step:
        yield (
            f"`batch.images_per_step={cell.batch.images_per_step}` "
            f"(`batch.scope={cell.batch.scope}`) is {cell.images_per_step} images in total, more "
            f"than the {num_train} training images of `data={cell.data.name}`: "
            f"use a smaller batch, or {more}."
        )
    if cell.task.epochs and num_test < cell.mesh.data_parallel_size:
        yield (
            f"`task={cell.task.name}` tests on {num_test} images of `data={cell.data.name}`, fewer "
            f"than the {cell.mesh.data_parallel_size} replicas: use `task=measure`, or {more}."
        )
