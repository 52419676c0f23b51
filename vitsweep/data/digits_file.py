"""Reading scikit-learn's digits, splitting and normalising them."""

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from vitsweep.data.resident import Images, ResidentBatches
from vitsweep.data.share import Share
from vitsweep.errors import VitsweepError
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.world import World


def open_digits(cell: CellSpec, world: World) -> ResidentBatches:
    """Return batches of digits on this rank's device."""
    images, labels = read_digits()
    held_out = every_third_by_class(labels)
    images = (images - images[~held_out].mean()) / images[~held_out].std()
    train, test = (
        Images(
            torch.from_numpy(images[part]).to(world.device),
            torch.from_numpy(labels[part]).to(world.device),
            int(part.sum()),
        )
        for part in (~held_out, held_out)
    )
    resize = partial(resize_bilinear, side=cell.batch.resolution_px)
    return ResidentBatches(train, test, Share.of(cell, world), resize)


def read_digits() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return images (1797, 1, 8, 8) with values 0 to 16 and labels (1797,).

    The file is read without importing scikit-learn, which takes longer (1.8 s) than measuring a
    small cell.

    Raises:
        VitsweepError: scikit-learn is not installed, or keeps the file elsewhere.
    """
    package = find_spec("sklearn")
    roots = package.submodule_search_locations if package else None
    path = Path(roots[0] if roots else "", "datasets", "data", "digits.csv.gz")
    if not path.is_file():
        raise VitsweepError(
            f"`data=digits` reads scikit-learn's {path.name}, which is not there: "
            "`pip install scikit-learn`, or use `data=synthetic`."
        )
    rows = np.loadtxt(path, delimiter=",", dtype=np.float32)
    return rows[:, :-1].reshape(-1, 1, 8, 8), rows[:, -1].astype(np.int64)


def every_third_by_class(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark every third image in the order of the classes, so that all lose the same share."""
    marked = np.zeros(len(labels), dtype=bool)
    marked[np.argsort(labels, kind="stable")[2::3]] = True
    return marked


def resize_bilinear(images: Tensor, side: int) -> Tensor:
    """Return (B, C, side, side); images of that size are returned as they are."""
    if images.shape[-1] == side:
        return images
    return interpolate(images, size=(side, side), mode="bilinear", antialias=True)
