"""Networks and loss of flow matching from their formulas, image by image and head by head, in float64.

They read nothing but weights by name, and share no code with the package.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

Weights = dict[str, Tensor]


def affine(w: Weights, name: str, x: Tensor) -> Tensor:
    return linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def norm(x: Tensor) -> Tensor:
    return layer_norm(x, x.shape[-1:], eps=1e-6)


def time_features(t: float) -> Tensor:
    """(256,) of 1000 t, rounded to float32."""
    return cosines_and_sines(1000 * t).float().double()


def cosines_and_sines(place: float) -> Tensor:
    angles = [place * 10_000 ** (-i / 128) for i in range(128)]
    return torch.tensor([*map(math.cos, angles), *map(math.sin, angles)], dtype=torch.float64)


def place_features(place: float, width: int) -> Tensor:
    angles = [place * 10_000 ** (-i / (width // 2)) for i in range(width // 2)]
    return torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)


def two_layers(w: Weights, name: str, x: Tensor) -> Tensor:
    return affine(w, f"{name}.2", silu(affine(w, f"{name}.0", x)))


def heads_of(x: Tensor, heads: int) -> list[Tensor]:
    return list(x.split(x.shape[-1] // heads, dim=-1))


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(T, K), (L, K), (L, K) -> (T, K)."""
    scores = torch.exp(torch.einsum("tk,lk->tl", q, k) / math.sqrt(q.shape[-1]))
    return torch.einsum("tl,lk->tk", scores / scores.sum(1, keepdim=True), v)


def rms(x: Tensor, scale: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * scale


def turned(x: Tensor) -> Tensor:
    """(T, K): pairs of neighbours are turned by the angle of their token."""
    places, pairs = torch.arange(len(x)).double(), torch.arange(0, x.shape[1], 2).double()
    angles = places[:, None] * 10_000 ** (-pairs / x.shape[1])
    a, b, cos, sin = x[:, 0::2], x[:, 1::2], angles.cos(), angles.sin()
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(1)


def mlp(w: Weights, name: str, x: Tensor) -> Tensor:
    return affine(w, f"{name}.mlp.down", gelu(affine(w, f"{name}.mlp.up", x)))


def patches(image: Tensor, spec: Any) -> Tensor:
    """(C, F, H, W) -> (X, Y, numbers of a patch)."""
    f, p = spec.frames_per_patch, spec.patch_px
    _, frames, height, width = image.shape
    return torch.stack(
        [
            torch.stack(
                [
                    image[:, t : t + f, i : i + p, j : j + p].flatten()
                    for i in range(0, height, p)
                    for j in range(0, width, p)
                ]
            )
            for t in range(0, frames, f)
        ]
    )


def unpatched(x_XYN: Tensor, spec: Any, like: Tensor) -> Tensor:
    """Tokens -> (2 C, F, H, W); numbers of a patch are frames, rows, columns, channels."""
    f, p = spec.frames_per_patch, spec.patch_px
    channels, frames, height, width = like.shape
    found = torch.zeros(2 * channels, frames, height, width, dtype=torch.float64)
    columns = width // p
    for t, tokens in enumerate(x_XYN):
        for place, token in enumerate(tokens):
            i, j = p * (place // columns), p * (place % columns)
            patch = token.reshape(f, p, p, -1).permute(3, 0, 1, 2)
            found[:, f * t : f * t + f, i : i + p, j : j + p] = patch
    return found


def embedded(w: Weights, image: Tensor, spec: Any, scale: float) -> Tensor:
    """(C, F, H, W) -> (X, Y, D) with the places in space."""
    kernel = w["embedding.patch.weight"].flatten(1)
    x = linear(patches(image, spec), kernel, w["embedding.patch.bias"])
    columns = image.shape[-1] // spec.patch_px
    half = spec.width // 2
    places = [
        torch.cat(
            [
                place_features((place % columns) / scale, half),
                place_features(place // columns / scale, half),
            ]
        )
        for place in range(x.shape[1])
    ]
    return x + torch.stack(places)


def dit(w: Weights, spec: Any, image: Tensor, t: float, label: int) -> Tensor:
    """One image (C, H, W) -> (2 C, H, W)."""
    c = silu(two_layers(w, "time", time_features(t)) + w["label.weight"][label])
    image = image[:, None]
    x = embedded(w, image, spec, 1.0)[0]
    for block in range(spec.depth):
        name = f"blocks.{block}"
        six = affine(w, f"{name}.modulation", c).reshape(6, -1)
        q, k, v = affine(w, f"{name}.attention.qkv", norm(x) * (1 + six[1]) + six[0]).chunk(3, -1)
        parts = zip(*(heads_of(each, spec.num_heads) for each in (q, k, v)), strict=True)
        y = torch.cat([attended(*part) for part in parts], dim=-1)
        x = x + six[2] * affine(w, f"{name}.attention.out", y)
        x = x + six[5] * mlp(w, name, norm(x) * (1 + six[4]) + six[3])
    shift, scale = affine(w, "modulation", c).chunk(2)
    out = affine(w, "head", norm(x) * (1 + scale) + shift)
    return unpatched(out[None], spec, image)[:, 0]


def stdit(w: Weights, spec: Any, video: Tensor, t: float, read: Any) -> Tensor:
    """One video (C, F, H, W), told a label or a text (n, width) -> (2 C, F, H, W)."""
    c = two_layers(w, "time", time_features(t))
    c = c + two_layers(w, "frame_rate", cosines_and_sines(24.0))
    common = affine(w, "modulation", silu(c)).reshape(6, -1)
    if isinstance(read, int):
        text = w["label.weight"][read][None]
    else:
        text = affine(w, "text.2", gelu(affine(w, "text.0", read)))
    x = embedded(w, video, spec, video.shape[-1] / 64)
    for block in range(spec.depth):
        name, is_temporal = f"blocks.{block}", block % 2 == 1
        six = w[f"{name}.table"] + common
        y = norm(x) * (1 + six[1]) + six[0]
        lines = y.unbind(1) if is_temporal else y.unbind(0)
        seen = []
        for line in lines:
            heads = []
            qkv = affine(w, f"{name}.attention.qkv", line).chunk(3, -1)
            for q, k, v in zip(*(heads_of(each, spec.num_heads) for each in qkv), strict=True):
                q = rms(q, w[f"{name}.attention.scale_q"])
                k = rms(k, w[f"{name}.attention.scale_k"])
                if is_temporal:
                    q, k = turned(q), turned(k)
                heads.append(attended(q, k, v))
            seen.append(affine(w, f"{name}.attention.out", torch.cat(heads, dim=-1)))
        x = x + six[2] * torch.stack(seen, dim=1 if is_temporal else 0)
        k, v = affine(w, f"{name}.cross.kv", text).chunk(2, -1)
        flat = affine(w, f"{name}.cross.q", x).flatten(0, 1)
        parts = zip(*(heads_of(each, spec.num_heads) for each in (flat, k, v)), strict=True)
        y = torch.cat([attended(*part) for part in parts], dim=-1).reshape(x.shape)
        x = x + affine(w, f"{name}.cross.out", y)
        x = x + six[5] * mlp(w, name, norm(x) * (1 + six[4]) + six[3])
    shift, scale = w["table"] + c
    return unpatched(affine(w, "head", norm(x) * (1 + scale) + shift), spec, video)


def loss(
    network: Any,
    w: Weights,
    spec: Any,
    data: Tensor,
    noise: Tensor,
    t: list[float],
    read: list[Any],
) -> Tensor:
    """Mean over images of the mean square of x - e and the first channels."""
    squares = []
    for x, e, time, condition in zip(data, noise, t, read, strict=True):
        predicted = network(w, spec, (1 - time) * x + time * e, time, condition)[: len(x)]
        squares.append(((predicted - (x - e)) ** 2).mean())
    return torch.stack(squares).mean()
