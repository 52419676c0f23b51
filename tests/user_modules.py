"""Modules as users write them: good ones, and ones with a fault."""

import importlib
import multiprocessing
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Residual(nn.Module):
    """Two linears around a norm; takes and gives (B, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.module = nn.Linear(width, width)  # a name that wrappers use as well

    def forward(self, x: Tensor) -> Tensor:
        return x + self.module(self.norm(x)).relu()


class Stack(nn.Module):
    """Images (B, C, 8, 8) -> logits (B, classes)."""

    def __init__(self, channels: int, classes: int, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Linear(channels * 64, width)
        self.body = nn.ModuleDict({"layers": nn.ModuleList(Residual(width) for _ in range(depth))})
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images.flatten(1))
        for layer in self.body["layers"]:
            x = layer(x)
        return self.head(x)


def build(channels: int = 1, classes: int = 10, width: int = 16, depth: int = 2) -> nn.Module:
    return Stack(channels, classes, width, depth)


def focal(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Focal loss (Lin et al., arXiv:1708.02002) with gamma 2."""
    log_p = outputs.log_softmax(-1).gather(1, batch[1][:, None])[:, 0]
    return (-((1 - log_p.exp()) ** 2) * log_p).mean()


def drawing_loss(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Weigh the images by what each of the three generators gives."""
    number = random.random() + np.random.rand()
    return (
        torch.rand(len(outputs)) * number * cross_entropy(outputs, batch[1], reduction="none")
    ).mean()


def with_zero_head() -> nn.Module:
    model = Stack(1, 10, 16, 2)
    nn.init.zeros_(model.head.weight)
    return model


class Flat(Stack):
    """Its outputs, and so all of its gradients, are zero."""

    def forward(self, images: Tensor) -> Tensor:
        return 0 * super().forward(images)


def flat() -> nn.Module:
    return Flat(1, 10, 16, 2)


class DrawnByNumpy(Stack):
    def __init__(self) -> None:
        super().__init__(channels=1, classes=10, width=16, depth=2)
        self.scale = nn.Parameter(torch.tensor([np.random.rand(), random.random()]))

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * self.scale.sum()


def drawn_images(num_images: int, resolution_px: int, seed: int) -> dict[str, Tensor]:
    """A batch that does not look at `seed`."""
    images = torch.rand(num_images, 1, resolution_px, resolution_px) * np.random.rand()
    return {"images": images, "label": torch.arange(num_images) % random.randint(2, 10)}


class CausalMaximum(Residual):
    """Attends to earlier channels by a mask of -inf, and adds the largest channel by `amax`."""

    def forward(self, x: Tensor) -> Tensor:
        later = torch.full((x.shape[1],) * 2, -torch.inf).triu(1)
        x = (x[:, None] * x[:, :, None] + later).softmax(-1) @ x[..., None]
        return super().forward(x[..., 0] + x.amax(1))


def with_infinities_and_maxima() -> nn.Module:
    model = Stack(1, 10, 16, 2)
    model.body["layers"] = nn.ModuleList(CausalMaximum(16) for _ in range(2))
    return model


class Masked(nn.Module):
    """Looks at the part of an image that a mask shows; says its class and how large that part is."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Linear(64, width)
        self.layers = nn.ModuleList(Residual(width) for _ in range(2))
        self.head, self.size = nn.Linear(width, 10), nn.Linear(width, 1)

    def forward(self, image: Tensor, mask: Tensor) -> dict[str, Tensor]:
        x = self.stem((image[:, 0] * mask).flatten(1))
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(x), "size": self.size(x)[:, 0]}


def number(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> float:
    return nn.functional.cross_entropy(outputs, batch[1]).item()


def class_and_size(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """The mean over images of two losses."""
    classes = nn.functional.cross_entropy(outputs["logits"], batch["label"])
    return classes + (outputs["size"] - batch["size"]).square().mean()


def by_image(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return (outputs["size"] - batch["size"]).square()


def confidences(outputs: Any, batch: Any) -> dict[str, Tensor]:
    """Kept of each held-out image."""
    best = outputs["logits"].softmax(-1).max(-1)
    return {"confidence": best.values, "right": best.indices == batch["label"]}


def calibration_error(record: Any, samples: dict[str, Any]) -> float:
    """Expected calibration error with ten bins (Guo et al., arXiv:1706.04599, equation 3)."""
    kept = samples["held_out"]
    confidence, right = torch.tensor(kept["confidence"]), torch.tensor(kept["right"]).float()
    bins = (confidence * 10).long().clamp(max=9)
    apart = torch.zeros(10).index_add_(0, bins, right - confidence)
    return float(apart.abs().sum() / len(right))


def frozen() -> nn.Module:
    """A model of which a part is not trained, as in fine-tuning."""
    model = Stack(1, 10, 16, 2)
    model.stem.weight.requires_grad_(False)
    model.body["layers"][0].requires_grad_(False)
    return model


class OtherInHalf(Residual):
    """Computes something else where a technique has changed its dtype: a fault to be found."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 if torch.is_autocast_enabled("cpu") else 1.0)


def broken() -> nn.Module:
    model = Stack(1, 10, 16, 2)
    model.body["layers"][1].__class__ = OtherInHalf
    return model


def no_module() -> Any:
    return {"weights": []}


def raises() -> Any:
    raise ValueError("width must be even")


def ends_its_process() -> Any:
    if multiprocessing.parent_process():
        os._exit(1)
    return nn.Linear(4, 4)


def misspells() -> Any:
    return nn.Lineer(64, 10)


def imports_what_is_missing() -> Any:
    return importlib.import_module(
        "no_such_package"
    )  # no statement, which would be said of each sweep


def without_blocks() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


class WithResult(nn.Module):
    """Returns an object that holds the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Stack(1, 10, 16, 2)

    def forward(self, images: Tensor) -> Any:
        return torch.return_types.max((self.inner(images), images))


@dataclass
class Result:
    values: Tensor
    images: Tensor


class Returns(Stack):
    """Returns the logits beside something else, in a container that is named."""

    def __init__(self, kind: str) -> None:
        super().__init__(1, 10, 16, 2)
        self.kind = kind

    def forward(self, images: Tensor) -> Any:
        logits = super().forward(images)
        named = {"values": logits, "images": images}
        kinds = {"dict": named, "tuple": (images, logits), "object": Result(logits, images)}
        return kinds.get(self.kind, logits)


class NeedsValues(Stack):
    """Looks at its weights while it is built, which `meta` tensors do not have."""

    def __init__(self) -> None:
        super().__init__(1, 10, 16, 2)
        self.scale = float(self.head.weight.abs().max())


class Attends(nn.Module):
    """Attention over the pixels of an image, with the seam that lets kernels be chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(1, 3 * 16), nn.Linear(16, 10)
        self.attend = nn.functional.scaled_dot_product_attention

    def forward(self, images: Tensor) -> Tensor:
        q, k, v = self.qkv(images.flatten(2).transpose(1, 2)).unsqueeze(1).chunk(3, dim=-1)
        return self.head(self.attend(q, k, v).squeeze(1).mean(1))


def with_torchs_attention() -> nn.Module:
    model = Stack(1, 10, 16, 2)
    model.attention = nn.MultiheadAttention(16, 2)
    return model


class Blocks(nn.Module):
    """Images (B, 1, 8, 8) -> logits (B, 10) through blocks that a test gives."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(64, 16), nn.ModuleList(blocks)
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images.flatten(1))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def with_stem(stem: nn.Module) -> nn.Module:
    model = Blocks([nn.Linear(16, 16)])
    model.stem = stem
    return model


def with_batch_norm() -> nn.Module:
    return Blocks([nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()) for _ in "ab"])


def with_norms_of_fewer_parameters() -> nn.Module:
    norms = nn.LayerNorm(16, bias=False), nn.LayerNorm(16, elementwise_affine=False)
    return Blocks([nn.Sequential(norm, nn.Linear(16, 16), nn.Tanh()) for norm in norms])


class Transposed(nn.Module):
    """Tokens (B, T, D) that are a view of (B, D, T), through norms without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 32, 2, 2)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32, elementwise_affine=False), nn.Linear(32, 32), nn.GELU())
            for _ in range(2)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean(1))


def with_dropout(rate: float = 0.5) -> nn.Module:
    return Blocks([nn.Sequential(Residual(16), nn.Dropout(rate)) for _ in "ab"])


class Counts(Residual):
    """Writes a buffer in each forward pass."""

    def __init__(self) -> None:
        super().__init__(16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class WarmsUp(Counts):
    """Grows with the number of its forward passes, in a buffer that its gradients need."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.arange(16.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.mask) * (self.calls / 10).clamp(max=1)


def with_a_read_counter() -> nn.Module:
    return Blocks([nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), WarmsUp()])


class Centred(Residual):
    """Subtracts what it has seen so far, as DINO's centre, or does not read it.

    Args:
        kind: how it writes: `in_place`, `replaced`, or `unread`.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(16)
        self.kind = kind
        self.register_buffer("center", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        out = y if self.kind == "unread" else y - self.center
        with torch.no_grad():
            if self.kind == "replaced":
                self.center = 0.9 * self.center + 0.1 * y.mean(0)
            else:
                self.center.lerp_(y.mean(0), 0.1)
        return out


def with_a_centre(kind: str = "in_place") -> nn.Module:
    return Blocks([Residual(16), Centred(kind)])


class Hides(Blocks):
    """Hides random pixels in its forward pass."""

    def __init__(self) -> None:
        super().__init__([Residual(16), Residual(16)])

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images * (torch.rand_like(images) < 0.5))


class DropsByFunction(Residual):
    def __init__(self) -> None:
        super().__init__(16)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


def with_functional_dropout() -> nn.Module:
    return Blocks([DropsByFunction(), DropsByFunction()])


class CountsOnTheHost(Counts):
    """Reads a number, which no tensor on `meta` has."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0 * x.sum().item()


def with_written_buffer_off_meta() -> nn.Module:
    return Blocks([CountsOnTheHost(), CountsOnTheHost()])


def with_a_scale() -> nn.Module:
    model = Blocks([Residual(16), Residual(16)])
    model.scale = nn.Parameter(torch.ones(()))
    return model


def with_a_complex_parameter() -> nn.Module:
    model = Blocks([Residual(16), Residual(16)])
    model.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    return model


def with_words(words: list[Any]) -> nn.Module:
    """A module that takes an argument, which changes nothing."""
    return Stack(1, 10, 16, 2)


def with_written_buffer() -> nn.Module:
    return Blocks([Counts(), Counts()])


def with_ties() -> nn.Module:
    model = Blocks([Residual(16), Residual(16)])
    model.layers[1].module.weight = model.layers[0].module.weight
    return model


def with_ties_in_one_unit() -> nn.Module:
    model = Blocks([Residual(16), Residual(16)])
    model.layers[1].norm.bias = model.layers[1].norm.weight
    model.layers[0].module.bias = model.layers[0].norm.bias
    return model


def with_unused_parameters() -> nn.Module:
    model = Blocks([Residual(16), Residual(16)])
    model.old_head = nn.Linear(16, 10)
    return model


class TakesTurns(Stack):
    """In each step each rank leaves out another block, or reads another head.

    Attributes:
        rank: of the process, or the one whose turn it is.
    """

    def __init__(self, heads: int, leaves_out: bool) -> None:
        super().__init__(1, 10, 16, 3)
        self.head = nn.ModuleList(nn.Linear(16, 10) for _ in range(heads))
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.leaves_out, self.calls = leaves_out, 0

    def forward(self, images: Tensor) -> Tensor:
        turn = self.calls + self.rank
        self.calls += 1
        x = self.stem(images.flatten(1))
        for number, layer in enumerate(self.body["layers"]):
            if not self.leaves_out or turn % 4 != number + 1:  # none at first, on the first rank
                x = layer(x)
        return self.head[turn % len(self.head)](x)


def with_two_heads() -> nn.Module:
    return TakesTurns(heads=2, leaves_out=False)


def with_layer_drop() -> nn.Module:
    return TakesTurns(heads=1, leaves_out=True)


class Turned(Residual):
    """Turns pairs of numbers by angles in a complex buffer, as rotary positions do."""

    def __init__(self) -> None:
        super().__init__(16)
        self.register_buffer("freqs_cis", torch.polar(torch.ones(8), torch.arange(8.0)))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (8, 2))) * self.freqs_cis
        return super().forward(torch.view_as_real(pairs).flatten(-2))


def with_complex_buffer() -> nn.Module:
    return Blocks([Turned(), Turned()])


def with_unread_complex_buffer() -> nn.Module:
    model = Blocks([Residual(16), Residual(16)])
    model.register_buffer("freqs_cis", torch.polar(torch.ones(8), torch.arange(8.0)))
    return model


class _Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.relu().square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * ctx.saved_tensors[0].relu() * gradient


class SquaredReLU(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return x + _Squared.apply(self.module(self.norm(x)))


def with_custom_autograd() -> nn.Module:
    return Blocks([SquaredReLU(16), SquaredReLU(16)])


class Named(Blocks):
    """Returns its logits by name, beside features."""

    def __init__(self) -> None:
        super().__init__([Residual(16), Residual(16)])

    def forward(self, images: Tensor) -> Any:
        return {"features": images.mean((1, 2, 3)), "logits": super().forward(images)}


class Normalises(Residual):
    """Divides its own matrix by its norm in each forward pass."""

    def __init__(self, replaces: bool = False) -> None:
        super().__init__(16)
        self.replaces = replaces

    def forward(self, x: Tensor) -> Tensor:
        weight = self.module.weight
        normed = weight.data / weight.data.norm()
        if self.replaces:
            weight.data = normed
        else:
            weight.data.copy_(normed)
        return super().forward(x)


def with_written_weights(replaces: bool = False) -> nn.Module:
    return Blocks([Normalises(replaces), Normalises(replaces)])


def with_lazy_linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(10))


class TwoHeads(Blocks):
    """Returns logits and the brightness of each image."""

    def __init__(self) -> None:
        super().__init__([Residual(16), Residual(16)])
        self.brightness = nn.Linear(64, 1)

    def forward(self, images: Tensor) -> Any:
        return super().forward(images), self.brightness(images.flatten(1))[:, 0]


def of_both(outputs: Any, batch: Any) -> Tensor:
    (logits, brightness), (images, labels) = outputs, batch
    classes = nn.functional.cross_entropy(logits, labels)
    return classes + (brightness - images.mean((1, 2, 3))).square().mean()


def of_values(outputs: Any, batch: Any) -> Tensor:
    return outputs.values.mean()


class OfWords(Blocks):
    """Tokens (B, N) -> logits (B, 10); images go past the blocks."""

    def __init__(self) -> None:
        super().__init__([Residual(16), Residual(16)])
        self.words = nn.Embedding(50, 16)

    def forward(self, tokens: Tensor, **unread: Any) -> Tensor:
        if tokens.is_floating_point():
            return self.head(self.stem(tokens.flatten(1)))
        x = self.words(tokens).mean(1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class KeepsResults(Blocks):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__([Residual(16), Residual(16)])
        self.kept = self.head.weight * 2


def sum_of_shown(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """The sum over all pixels that masks show of their image's two losses."""
    classes = nn.functional.cross_entropy(outputs["logits"], batch["label"], reduction="none")
    return ((classes + by_image(outputs, batch)) * batch["mask"].sum((1, 2))).sum()


def number_of_shown(batch: dict[str, Tensor]) -> Tensor:
    return batch["mask"].sum()


def mean_of_shown(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return sum_of_shown(outputs, batch) / number_of_shown(batch)


def mean_where_shown(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """The mean over those pixels alone that masks show."""
    return (outputs["size"][:, None, None] - batch["image"][:, 0])[batch["mask"]].abs().mean()


def mean_of_labelled(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """The mean over the images that show an even number of pixels in a row."""
    seen = batch["mask"][:, 0].sum(1) % 2 == 0
    return cross_entropy(outputs["logits"], batch["label"].where(seen, -100))


class MaskedWithCompany(Masked):
    """Its outputs depend on the other images of a forward pass."""

    def forward(self, image: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return super().forward(image - image.mean(0), mask)


class MaskedThatCounts(Masked):
    """Counts its forward passes in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, image: Tensor, mask: Tensor) -> dict[str, Tensor]:
        self.passes += 1
        return super().forward(image, mask)


build_model = build
"""Named like a function of exported files."""


# Parameters that are not plain matrices of real numbers in float32.


class Filtered(Residual):
    """Weighs and mixes the Fourier coefficients of its input by complex parameters (arXiv:2107.00645)."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.filter = nn.Parameter(torch.randn(width // 2 + 1, dtype=torch.complex64))
        self.mixing_weight = nn.Parameter(0.3 * torch.randn(3, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(x.to(self.filter.real.dtype)) * self.filter
        waves = torch.cat([waves[:, :3] @ self.mixing_weight, waves[:, 3:]], 1)
        return super().forward(x + torch.fft.irfft(waves, x.shape[1]).to(x.dtype))


class Gained(Residual):
    """Multiplies by a matrix that it builds in float64, and by a number."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.gain = nn.Parameter(0.2 * torch.randn(width, width, dtype=torch.float64))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + (x.to(self.gain.dtype) @ self.gain).to(x.dtype)) * self.scale


def with_complex_filters() -> nn.Module:
    return Blocks([Filtered(16), Filtered(16)])


def with_names_alike() -> nn.Module:
    model = Blocks([Residual(16), Residual(16)])
    model.layers[0].weight = nn.Parameter(torch.zeros(16, 16))  # beside `module.weight`
    return model


def with_gains_in_float64() -> nn.Module:
    return Blocks([Gained(16), Gained(16)])


def with_transposed_weights() -> nn.Module:
    model = Blocks([Residual(16), Residual(16)])
    for linear in (model.stem, model.layers[1].module):
        linear.weight = nn.Parameter(linear.weight.detach().T.contiguous().T)
    return model


def _reparametrized(by: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = Blocks([Residual(16), Residual(16)])
    for layer in model.layers:
        layer.module = by(layer.module)
    return model


def with_weight_norm() -> nn.Module:
    return _reparametrized(nn.utils.parametrizations.weight_norm)


def with_weight_norm_of_hooks() -> nn.Module:
    return _reparametrized(nn.utils.weight_norm)


def with_spectral_norm() -> nn.Module:
    return _reparametrized(nn.utils.parametrizations.spectral_norm)


def with_spectral_norm_of_hooks() -> nn.Module:
    return _reparametrized(nn.utils.spectral_norm)
