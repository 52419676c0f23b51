"""The plain twin of every choice that changes the model, beside a ViT written from its equations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.cells import cell
from tests.choices import choice
from tests.shapes import NANO, build, replace
from vitsweep.model.initialize import Draws
from vitsweep.spec.menu import choices, class_of

Weights = dict[str, Tensor]
Mix = Callable[[Tensor, Tensor], Tensor]
"""q and k of a head (T, K) -> what each token takes of every other (T, T)."""
Mixes = Mix | tuple[Mix, ...]
"""Of all heads, or of each."""


def softmax(q: Tensor, k: Tensor, seen: Tensor | None = None) -> Tensor:
    scores = (q @ k.T / q.shape[1] ** 0.5).exp()
    scores = scores if seen is None else scores * seen
    return scores / scores.sum(1, keepdim=True)


def causal(q: Tensor, k: Tensor) -> Tensor:
    return softmax(q, k, torch.ones(len(q), len(q)).tril())


def linear(q: Tensor, k: Tensor) -> Tensor:
    def phi(x: Tensor) -> Tensor:
        return torch.where(x > 0, x + 1, x.exp())

    return phi(q) @ phi(k).T / q.shape[1] / len(q)


def decaying(decay: float) -> Mix:
    def mix(q: Tensor, k: Tensor) -> Tensor:
        rows = [[decay ** (t - s) * (s <= t) for s in range(len(q))] for t in range(len(q))]
        weights = torch.tensor(rows, dtype=q.dtype)
        return len(q) * linear(q, k) * weights / weights.sum(1, keepdim=True)

    return mix


def norm(w: Weights, name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + NANO.norm_eps).sqrt()
    return centred / scale * w[f"{name}.weight"] + w[f"{name}.bias"]


def product(w: Weights, name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def attention(w: Weights, block: str, x: Tensor, mix: Mixes) -> Tensor:
    qkv = product(w, f"{block}.attention.qkv", x).chunk(3, 1)
    mixes = mix if isinstance(mix, tuple) else NANO.num_heads * (mix,)
    heads = zip(mixes, *(part.chunk(NANO.num_heads, 1) for part in qkv), strict=True)
    joined = torch.cat([own(q, k) @ v for own, q, k, v in heads], 1)
    return product(w, f"{block}.attention.out", joined)


def mlp(w: Weights, block: str, x: Tensor) -> Tensor:
    up = product(w, f"{block}.mlp.up", x)
    return product(w, f"{block}.mlp.down", up * (1 + torch.erf(up / 2**0.5)) / 2)


def tokens(w: Weights, image: Tensor) -> Tensor:
    """Class token, registers, patches: (T, D)."""
    corners = [(row, column) for row in range(0, 8, 2) for column in range(0, 8, 2)]
    patches = torch.stack([image[:, r : r + 2, c : c + 2].flatten() for r, c in corners])
    x = patches @ w["embedding.patch.weight"].flatten(1).T + w["embedding.patch.bias"]
    prefix = [w["embedding.class_token"][None]] if "embedding.class_token" in w else []
    x = torch.cat([*prefix, x]) + w["embedding.position"]
    split = len(prefix)
    return torch.cat([x[:split], w.get("embedding.registers", x[:0]), x[split:]])


def logits(
    w: Weights,
    image: Tensor,
    *,
    mix: Mixes = softmax,
    parallel: bool = False,
    pooled: bool = False,
    kept: Tensor | None = None,
    shares: Any = None,
) -> Tensor:
    """One image; `kept` are its tokens, `shares` what each branch of each block is multiplied by."""
    x = tokens(w, image)
    x = x if kept is None else x[kept]
    for number in range(NANO.depth):
        block = f"blocks.{number}"
        of_attention, of_mlp = (1.0, 1.0) if shares is None else shares[number]
        normed = norm(w, f"{block}.norm_attention", x)
        added = of_attention * attention(w, block, normed, mix)
        if not parallel:
            normed = norm(w, f"{block}.norm_mlp", x + added)
        x = x + added + of_mlp * mlp(w, block, normed)
    x = norm(w, "norm", x)
    return product(w, "head", x.mean(0) if pooled else x[0])


POOLED = {"pooling": "mean"}
TWINS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # Choice, and what tells it from others -> its knobs, arguments of our model, arguments of the equations.
    "attention=sdpa_causal": ({}, POOLED, {"mix": causal, "pooled": True}),
    "attention=linear": ({}, {}, {"mix": linear}),
    "attention=linear causal": ({"causal": True}, POOLED, {"mix": decaying(1), "pooled": True}),
    "attention=linear decaying": (
        {"causal": True, "decay": 0.8}, POOLED, {"mix": decaying(0.8), "pooled": True}
    ),
    "classifier=pooled": ({}, POOLED, {"pooled": True}),
    "tokens=drop": ({}, {}, {}),
    "tokens=registers": ({"count": 2}, {"spec": replace(NANO, registers=2)}, {}),
    "vit_block=drop_samples": ({}, {}, {}),
    "vit_block=parallel": ({}, {}, {"parallel": True}),
}  # fmt: skip
IMAGES = torch.randn(5, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_every_choice_that_changes_the_model_is_here() -> None:
    typed = [(group, name) for group in cell().techniques for name in choices(group)]
    changing = [f"{g}={name}" for g, name in typed if class_of(g, name).changes_model]
    assert {typed.split()[0] for typed in TWINS} == set(changing)


def drawn_by(model: Any, choice: str) -> list[dict[str, Any]]:
    """What the model draws in a step, image by image, read off what it gives and takes."""
    found: list[dict[str, Any]] = [{} for _ in IMAGES]
    if choice == "tokens=drop":
        whole = build().embedding(IMAGES)
        for own, every, rows in zip(found, whole, model.embedding(IMAGES), strict=True):
            own["kept"] = torch.stack([(every == row).all(1).nonzero()[0, 0] for row in rows])
        assert len({tuple(own["kept"].tolist()) for own in found}) > 1
    if choice == "vit_block=drop_samples":
        places: list[list[list[int]]] = []
        for block in model.blocks:
            block.register_forward_pre_hook(
                lambda block, given: places.append([each.tolist() for each in given[2:]])
            )
        model(IMAGES)
        for number, own in enumerate(found):
            own["shares"] = [[len(IMAGES) / len(p) * (number in p) for p in of] for of in places]
    return found


def test_a_reference_twin_is_its_equations() -> None:
    for typed in TWINS:
        knobs, of_model, of_equations = TWINS[typed]
        built = build(**of_model)
        vars(built)["draws"] = draws = Draws(0)
        model = choice(*typed.split()[0].split("="), **knobs).plain_twin(built)
        draws.begin(0)
        drawn = drawn_by(model, typed)
        draws.begin(0)
        found = model(IMAGES)
        weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        wanted = torch.stack(
            [
                logits(weights, i, **of_equations, **own)
                for i, own in zip(IMAGES, drawn, strict=True)
            ]
        )
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
        found.square().sum().backward()
        wanted.square().sum().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                parameter.grad, weights[name].grad, rtol=1e-9, atol=1e-11, msg=name
            )
