"""Draw samples of a diffusion transformer that was trained on digits, by Euler steps.

    python -m analysis.flow_samples WEIGHTS FILE.png [--each 20] [--guidance 2]

WEIGHTS is a file `weights*.safetensors` in the folder of the cell that was trained. Of an image model the
picture has five samples of each digit, and a classifier of the real digits says how many are recognised. Of a
video model each row is one video.
"""

import argparse
from pathlib import Path

import matplotlib.image
import torch
import yaml
from safetensors.torch import load_file
from sklearn.svm import SVC
from torch import Tensor, nn
from torch.nn.functional import pad

from vitsweep.data.digits import every_third_by_class, read_digits
from vitsweep.model.build import build_model
from vitsweep.objectives.diffusion_spec import SINUSOIDS
from vitsweep.objectives.positions import time_features
from vitsweep.objectives.velocity import PER_TIME
from vitsweep.spec.from_yaml import cell_from_tree

BLACK = -1.0
"""About what a black pixel is, normalised."""


@torch.no_grad()
def samples(
    network: nn.Module,
    shape: tuple[int, ...],
    labels_N: Tensor,
    *,
    no_label: int,
    steps: int = 50,
    guidance: float = 1.0,
) -> Tensor:
    """Return inputs (N, *shape): from noise at t = 1 along the velocity x - e to data at t = 0.

    Args:
        network: trained by `objective=flow_matching`.
        shape: of one input, channels first.
        labels_N: what to draw.
        no_label: the label that stands for none.
        steps: of Euler's method.
        guidance: how many times the difference to what no label gives is followed; 1 for the label's own.
    """
    x, nothing = torch.randn(len(labels_N), *shape), torch.full_like(labels_N, no_label)
    for step in range(steps):
        times = torch.full((len(x),), PER_TIME * (1 - step / steps))
        told = time_features(times, SINUSOIDS).float()
        own, without = (network(x, told, label=n)[:, : shape[0]] for n in (labels_N, nothing))
        x = x + (without + guidance * (own - without)) / steps
    return x


def recognised(images_N: Tensor, labels_N: Tensor) -> float:
    """Return the share of digits (N, 1, 8, 8) that a support vector machine of the real ones finds equal."""
    images, labels = read_digits()
    is_real = ~every_third_by_class(labels)
    mean, deviation = images[is_real].mean(), images[is_real].std()
    real = (images.reshape(len(images), -1) - mean) / deviation
    classifier = SVC().fit(real[is_real], labels[is_real])
    print(f"of held-out digits: {classifier.score(real[~is_real], labels[~is_real]):.1%}")
    return float(classifier.score(images_N.flatten(1).numpy(), labels_N.numpy()))


def main() -> None:
    """Draw, and say what was recognised."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--each", type=int, default=20, help="samples of a label")
    parser.add_argument("--guidance", type=float, default=2.0)
    options = parser.parse_args()
    frozen = (options.weights.parents[2] / "cell.yaml").read_text(encoding="utf-8")
    cell = cell_from_tree(yaml.safe_load(frozen)["cell"])
    network = build_model(cell)
    network.load_state_dict(load_file(options.weights))
    torch.manual_seed(0)
    shape, classes = cell.model.input_shape(cell.batch.resolution_px), cell.model.num_classes
    labels = torch.arange(classes).repeat(options.each)
    drawn = samples(network, shape, labels, no_label=classes, guidance=options.guidance)
    if len(shape) == 4:
        rows = drawn[:10, 0]  # (videos, frames, height, width)
    else:
        print(f"recognised: {recognised(drawn, labels):.1%} of {len(drawn)}")
        rows = drawn[:50, 0].unflatten(0, (5, 10))
    framed = pad(rows, (1, 1, 1, 1), value=BLACK)
    picture = framed.transpose(1, 2).flatten(0, 1).flatten(1)
    large = picture.repeat_interleave(3, 0).repeat_interleave(3, 1)
    matplotlib.image.imsave(options.file, large, cmap="gray", vmin=BLACK, vmax=2)


if __name__ == "__main__":
    main()
