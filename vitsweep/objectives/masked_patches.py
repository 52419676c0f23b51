"""Masked autoencoders at work: masks, decoder, loss, and a slow second implementation (needs torch)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitsweep.model.attention import TokenAxis
from vitsweep.model.block import Block, Stack
from vitsweep.model.initialize import draw_transformer_weight, picked_rows
from vitsweep.model.vit import ViT
from vitsweep.objectives.base import Batch, OpenObjective, Step, Sum
from vitsweep.objectives.positions import grid_positions
from vitsweep.objectives.probe import Encoder, Probed
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.model_spec import ViTSpec

# Axes: B images, P patches, R of them removed, T tokens, D width, K numbers of a patch.


class MaskedAutoencoderViT(Encoder):
    """Images without most of their patches -> all patches (B, P, K).

    Args:
        vit: whose embedding, blocks and norm become the encoder.
        objective: with the decoder's sizes.
    """

    def __init__(self, vit: ViT, objective: Any) -> None:
        super().__init__(vit)
        self.side = vit.resolution_px // vit.spec.patch_px
        self.num_kept = objective.kept(self.side**2)
        axis = 1 if vit.batch_first else 0
        self.embedding = vit.embedding
        self.embedding.position.requires_grad_(False)
        axes = (TokenAxis(axis, self.num_prefix_tokens + self.num_kept),)
        self.blocks = Stack(vit.blocks, norm=vit.norm, axes=axes)
        self.norm = vit.norm
        assert isinstance(vit.spec, ViTSpec)
        decoder = objective.decoder(vit.spec)
        self.to_decoder = nn.Linear(vit.spec.width, decoder.width)
        self.mask_token = nn.Parameter(torch.zeros(decoder.width))
        whole = self.num_prefix_tokens + self.side**2
        self.decoder_position = nn.Parameter(torch.zeros(whole, decoder.width), requires_grad=False)
        norm = nn.LayerNorm(decoder.width, eps=decoder.norm_eps)
        self.decoder_blocks = Stack(
            (Block(decoder, batch_first=vit.batch_first) for _ in range(decoder.depth)),
            norm=norm,
            axes=(TokenAxis(axis, whole),),
        )
        self.decoder_norm = norm
        self.head = nn.Linear(decoder.width, vit.spec.patch_px**2 * vit.spec.in_channels)

    def draw(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Draw one weight in place: positions are fixed, what the decoder adds is as in its source."""
        if name in ("embedding.position", "decoder_position"):
            weight.zero_()
            places = grid_positions(self.side, self.side, weight.shape[1], weight.device)
            weight[-(self.side**2) :] = places
        elif name in ("to_decoder.weight", "head.weight"):
            nn.init.xavier_uniform_(weight, generator=generator)
        elif name == "mask_token":
            nn.init.normal_(weight, std=0.02, generator=generator)
        elif name == "decoder_norm.weight":
            nn.init.ones_(weight)
        else:
            scale = self.spec.layer_scale or 1.0
            draw_transformer_weight(name, weight, generator, layer_scale=scale)

    def forward(self, image: Tensor, order: Tensor | None = None) -> Tensor:
        """Encode the first patches of each image's `order` (B, P), and predict all in their places.

        Without an order, return what a classifier would read of all patches (B, D).
        """
        x, context = self.enter(image)
        if order is None:
            return self.features(self.by_image(self.norm(self.blocks(x, context))))
        x = self.norm(self.blocks(self._kept(x, order), context))
        x = self.decoder_norm(self.decoder_blocks(self._completed(self.to_decoder(x), order), None))
        return self.head(self.by_image(x)[:, self.num_prefix_tokens :])

    def _as_blocks(self, x_BTD: Tensor) -> Tensor:
        return x_BTD if self.batch_first else x_BTD.transpose(0, 1).contiguous()

    def _kept(self, x: Tensor, order_BP: Tensor) -> Tensor:
        first = self.num_prefix_tokens
        prefix = torch.arange(first, device=x.device).expand(len(order_BP), -1)
        places = torch.cat([prefix, order_BP[:, : self.num_kept] + first], dim=1)
        return self._as_blocks(picked_rows(self.by_image(x), places))

    def _completed(self, x: Tensor, order_BP: Tensor) -> Tensor:
        x_BTD, first = self.by_image(x), self.num_prefix_tokens
        images, removed = len(order_BP), order_BP.shape[1] - self.num_kept
        fillers = self.mask_token.expand(
            images, removed, -1
        )  # float32 under autocast, and so the sum
        # `order` says which patch comes when, its own order when each patch comes
        prefix = torch.arange(first, device=x.device).expand(images, -1)
        places = torch.cat([prefix, order_BP.argsort(1) + first], dim=1)
        whole = picked_rows(torch.cat([x_BTD, fillers], dim=1), places)
        return self._as_blocks(whole + self.decoder_position)


class MaskedPatches(Probed):
    """Masks by image, and the mean square over removed patches."""

    def __init__(self, cell: CellSpec) -> None:
        super().__init__(cell)
        self.patch_px: int = cell.model.patch_px  # type: ignore[attr-defined]
        self.patches = (cell.batch.resolution_px // self.patch_px) ** 2
        self.kept: int = self.settings.kept(self.patches)

    def network(self, model: nn.Module) -> nn.Module:
        """Return an encoder with its decoder."""
        assert isinstance(model, ViT), "refused with other models"
        return MaskedAutoencoderViT(model, self.settings)

    def of_probe(self, batch: Batch) -> Batch:
        """Return whole images."""
        return {"image": batch["image"]}

    def prepare(self, batch: Batch, step: Step) -> Batch:
        """Add `order` (B, P) int64: a permutation of the patches of each image, whose first are kept."""
        drawn = step.uniform("mask", len(batch["image"]), self.patches)
        return {**batch, "order": drawn.argsort(dim=1, stable=True)}

    def loss(self, outputs: Tensor, batch: Batch, step: Step) -> Tensor:
        """Return the mean over the pixels of each patch, then over all removed patches."""
        target = self._targets(batch["image"].to(outputs.dtype))
        apart = (outputs - target).square().mean(dim=-1)
        return apart.gather(1, batch["order"][:, self.kept :]).mean()

    def _targets(self, images_BCHW: Tensor) -> Tensor:
        size = self.patch_px
        x_BChpwq = images_BCHW.unflatten(3, (-1, size)).unflatten(2, (-1, size))
        x_BPK = x_BChpwq.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        if not self.settings.normalized_targets:
            return x_BPK
        variance, mean = torch.var_mean(x_BPK, dim=-1, keepdim=True)
        return (x_BPK - mean) / (variance + 1e-6).sqrt()

    def score(self, outputs: Tensor, batch: Batch, step: Step) -> Mapping[str, Sum]:
        """Return the loss of held-out images, whose masks are always the same."""
        images = len(outputs)
        return {"held_out_loss": Sum(self.loss(outputs, batch, step) * images, images)}

    def reference(self) -> OpenObjective:
        """Return loops over images and patches."""
        return _PatchByPatch(self.cell)


# The same, slowly.


class _PlainMaskedAutoencoderViT(MaskedAutoencoderViT):
    def forward(self, image: Tensor, ranks: Tensor) -> Tensor:  # type: ignore[override]
        """Put the tokens of each image together one by one; `ranks` (B, P) says when a patch comes."""
        tokens, first = self.embedding(image), self.num_prefix_tokens
        kept = [sorted(range(len(r)), key=r.__getitem__)[: self.num_kept] for r in ranks.tolist()]
        seen = [
            torch.stack([*x[:first], *(x[first + place] for place in places)])
            for x, places in zip(tokens, kept, strict=True)
        ]
        encoded = self.norm(self.blocks(torch.stack(seen)))
        filled = []
        for x, places in zip(self.to_decoder(encoded), kept, strict=True):
            at = {place: first + number for number, place in enumerate(places)}
            patches = range(ranks.shape[1])
            x = x.to(self.mask_token.dtype)
            rows = [x[at[p]] if p in at else self.mask_token for p in patches]
            filled.append(torch.stack([*x[:first], *rows]) + self.decoder_position)
        decoded = self.decoder_norm(self.decoder_blocks(torch.stack(filled)))
        return self.head(decoded[:, first:])


class _PatchByPatch(MaskedPatches):
    def network(self, model: nn.Module) -> nn.Module:
        assert isinstance(model, ViT)
        return _PlainMaskedAutoencoderViT(model, self.settings)

    def prepare(self, batch: Batch, step: Step) -> Batch:
        drawn = step.uniform("mask", len(batch["image"]), self.patches)
        # how many of an image's numbers are smaller, or as small and come before
        ranks = torch.zeros_like(drawn, dtype=torch.int64)
        for a in range(self.patches):
            for b in range(self.patches):
                before = drawn[:, b] <= drawn[:, a] if b < a else drawn[:, b] < drawn[:, a]
                ranks[:, a] += before
        return {**batch, "ranks": ranks}

    def loss(self, outputs: Any, batch: Batch, step: Step) -> Tensor:
        size, side = self.patch_px, self.cell.batch.resolution_px // self.patch_px
        losses = []
        for found, image, ranks in zip(outputs, batch["image"], batch["ranks"], strict=True):
            for patch in range(self.patches):
                if int(ranks[patch]) < self.kept:
                    continue
                row, column = divmod(patch, side)
                pixels = image[:, row * size :, column * size :][:, :size, :size]
                target = pixels.permute(1, 2, 0).reshape(-1).to(found.dtype)
                if self.settings.normalized_targets:
                    centred = target - target.mean()
                    variance = (centred * centred).sum() / (len(target) - 1)
                    target = centred / (variance + 1e-6) ** 0.5
                losses.append(((found[patch] - target) ** 2).sum() / len(target))
        return torch.stack(losses).sum() / len(losses)
