"""A model of the user's: any factory of an `nn.Module`, described without importing it."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Gt

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.from_yaml import (
    Word,
    imported_function,
    title_of,
    wrong_function,
    wrong_target,
)
from vitsweep.spec.generators import kept_generators, seeded_generators, set_generators
from vitsweep.spec.model_spec import ModelSpec, refused_with_own_loss

OF_TRANSFORMERS: Mapping[str, tuple[str, str]] = {
    "classifier": ("token", "chooses among tokens"),
    "attention": ("sdpa_auto", "computes attention"),
    "vit_block": ("plain", "rearranges the branches of transformer blocks"),
    "tokens": ("all", "drops or adds tokens"),
    "sequence_parallel": ("none", "shares tokens among ranks"),
    "tensor_parallel": ("none", "splits heads and MLPs"),
    "pipeline_parallel": ("none", "deals out transformer blocks"),
}
"""Group -> its plain choice, which does nothing here, and what all others do."""


@dataclass(frozen=True, kw_only=True)
class ModuleSpec(ModelSpec):
    """Any factory of an `nn.Module` that takes images (B, C, H, W) and returns logits (B, classes).

    Where `data` gives mappings, `forward` is called with the entries that it names, by name.

    Attributes:
        target: path of the factory, `package.module.function`, called with keyword arguments.
        arguments: of the factory.
        shape_arguments: argument of the factory -> what it is given of the cell: `num_classes`,
            `in_channels` or `resolution_px`.
        passes_name: give the factory `model.name` as its argument `name`.
        blocks: path of what the module stacks, such as `encoder.layers`; `*` stands for any name.
            `auto` takes the list of equal modules with most parameters. Sharding, recomputation and
            compilation work on these.
        output: where in what the module returns the logits are: the key of a dict, the place in a tuple
            (from 0) or an attribute; null where it returns them.
        seams: what the module offers to techniques: `attend` where its attention modules call
            `self.attend(q, k, v)` on tensors (B, heads, T, K), as `vitsweep.model.attention` does.
        twin_arguments: arguments of the small module on which techniques are proved, over
            `arguments`; dropout must be off in it.
        twin_side_px: side of the images of that proof; null for that of the cell.
        loss: path of a function (outputs, batch) -> mean loss, in place of the cross entropy. `outputs`
            are what `output` names, float32 or better; `batch` is the pair (images, labels), or the mapping
            that `data` gives. Over micro-batches and replicas its mean is taken, unless there is a
            `loss_count`.
        loss_count: path of a function (batch) -> over how many values of a micro-batch `loss` is a sum, a
            number or a tensor of one. The loss of a step is the sum over all micro-batches of all replicas,
            divided by their count; null for a `loss` that returns a mean.
        twin_batch: path of a function (num_images, resolution_px, seed) -> mapping of tensors, such as
            `data` gives where it gives mappings: for the proof and the count of FLOPs.
        package: whose version is part of the cell; null for a module whose source is hashed.
        version: of the package.
    """

    name: Annotated[str, Word(r"\w[\w.-]*")]
    target: str | None
    arguments: dict[str, Any] = field(hash=False)
    shape_arguments: dict[str, Literal["num_classes", "in_channels", "resolution_px"]] = field(
        hash=False
    )
    passes_name: bool
    blocks: str
    output: str | int | None
    seams: tuple[Literal["attend"], ...]
    twin_arguments: dict[str, Any] = field(hash=False, metadata={"identity": False})
    twin_side_px: Annotated[int, Gt(0)] | None = field(metadata={"identity": False})
    package: str | None
    version: Annotated[str, Word(r"\w[\w.+-]*")] | None
    loss: str | None = field(default=None, metadata={"identity": "where set"})
    twin_batch: str | None = field(default=None, metadata={"identity": False})
    loss_count: str | None = field(default=None, metadata={"identity": "where set"})

    norms_over_batch: ClassVar[bool] = True
    """It may have BatchNorm: nobody knows before it is built."""
    draws_by_itself: ClassVar[bool] = True

    @property
    def typed(self) -> str:
        """How a message names the model."""
        if self.passes_name:
            return f"model={self.package} model.name={self.name}"
        return f"model={self.name} model.target={self.target}"

    @property
    def title(self) -> str:
        """The class or function that is called, unless a YAML file names the choice."""
        return title_of(self.name, self.target)

    @property
    def code_modules(self) -> tuple[str, ...]:
        """Modules of all functions; of an installed package the version is compared instead."""
        target = None if self.package else self.target
        named = (target, self.loss, self.loss_count, self.twin_batch)
        return tuple(path.rpartition(".")[0] for path in named if path)

    @property
    def key(self) -> str:
        """Text that is equal for two modules that are built alike."""
        return json.dumps(vars(self), sort_keys=True, default=str)

    def factory(self) -> Any:
        """Import the factory.

        Raises:
            Exception: whatever importing its module raises, or there is no such name in it.
        """
        assert self.target is not None, "refused when the cell was made"
        return imported_function(self.target)

    def own_loss(self) -> "Callable[[Any, Any], Any] | None":
        """Import the loss.

        Raises:
            Exception: whatever importing its module raises, or there is no such name in it.
        """
        return imported_function(self.loss) if self.loss else None

    def own_count(self) -> "Callable[[Any], Any] | None":
        """Import the count of the loss.

        Raises:
            Exception: whatever importing its module raises, or there is no such name in it.
        """
        return imported_function(self.loss_count) if self.loss_count else None

    def example(self, num_images: int, resolution_px: int, seed: int = 0) -> Any:
        """Call `twin_batch`, where it is set.

        Raises:
            Exception: whatever importing its module or calling it raises.
        """
        if self.twin_batch is None:
            return None
        make = imported_function(self.twin_batch)
        with seeded_generators(seed, "twin_batch"):
            return make(num_images=num_images, resolution_px=resolution_px, seed=seed)

    def call(self, factory: Any, resolution_px: int) -> Any:
        """Call the factory for images of this side; what it draws follows from torch's seed.

        Raises:
            Exception: whatever the factory raises.
        """
        import torch

        given = {
            argument: resolution_px if shape == "resolution_px" else getattr(self, shape)
            for argument, shape in self.shape_arguments.items()
        }
        named = {"name": self.name} if self.passes_name else {}
        with kept_generators():
            set_generators(torch.initial_seed())
            return factory(**named, **(given | self.arguments))

    def input_shape(self, resolution_px: int) -> tuple[int, ...]:
        """One image."""
        return (self.in_channels, resolution_px, resolution_px)

    def twin(self, depth: int, num_classes: int, unit: int = 1) -> "ModuleSpec":
        """Return the module with `twin_arguments`; without them it is proved in its own size."""
        return replace(self, arguments=self.arguments | self.twin_arguments)

    @property
    def twin_resolution_px(self) -> int | None:
        """Side of the images of the proof."""
        return self.twin_side_px

    def refused(self, cell: "CellSpec") -> dict[str, str]:
        """Refuse what needs the inside of a module to be known."""
        reasons = {
            group: f"`{group}={getattr(cell, group).name}` {why}, and of `{self.typed}` vitsweep knows "
            f"the blocks alone: use `{group}={plain}`."
            for group, (plain, why) in OF_TRANSFORMERS.items()
            if getattr(cell, group).needs_transformer
        }
        if "attention" in reasons:
            if "attend" in self.seams and cell.attention.replaces_attend_alone:
                del reasons["attention"]
            else:
                reasons["attention"] = (
                    f"{reasons['attention'][:-1]}, or let its attention modules call "
                    "`self.attend(q, k, v)` and say so with `model.seams=[attend]`."
                )
        if not cell.layout.batch_first or cell.layout.channels_last:
            reasons["layout"] = (
                f"`layout={cell.layout.name}` orders axes inside the model, and `{self.typed}` has an "
                "order of its own: use `layout=batch_first` with `layout.channels_last=false`."
            )
        if cell.precision.float8:
            reasons["precision"] = (
                f"`precision={cell.precision.name}` swaps linears of vitsweep's own blocks: use "
                "`precision=O1` or `precision=bf16`."
            )
        return reasons

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Import and build the module, without memory for its weights, and say what is wrong with it."""
        yield from super().conflicts(cell)
        if wrong := wrong_target("model", self.name, self.target, "an `nn.Module`"):
            yield wrong
        elif self.passes_name and self.name == self.package:
            yield f"`model={self.package}` needs `model.name=...`, such as {EXAMPLES[self.package]}."
        else:
            from vitsweep.model.user_module import problems, technique_problems

            fits = not any(cell.data.shape_faults(cell))  # else the model would be blamed
            yield from problems(self, cell.batch.resolution_px, run=fits)
            yield from self._loss_conflicts(cell)
            if fits:
                yield from technique_problems(self, cell)

    def _loss_conflicts(self, cell: "CellSpec") -> Iterator[str]:
        yield from wrong_function("model.loss", self.loss, "outputs and batch")
        yield from wrong_function("model.loss_count", self.loss_count, "a batch")
        if self.loss is None:
            if self.loss_count:
                yield (
                    f"`model.loss_count={self.loss_count}` counts over what a `model.loss` sums, and there "
                    "is none: name one, or leave it out."
                )
            return
        yield from refused_with_own_loss(cell, "model.loss")
        if cell.task.label_smoothing:
            yield (
                f"`task.label_smoothing={cell.task.label_smoothing:g}` is part of the cross entropy, which "
                f"`model.loss={self.loss}` replaces: use `task.label_smoothing=0`."
            )
        if cell.task.epochs and cell.recipe.mixes:
            yield (
                f"`recipe={cell.recipe.name}` mixes images and labels for the cross entropy, which "
                f"`model.loss={self.loss}` replaces: use `recipe.mixup_alpha=0 recipe.cutmix_alpha=0`."
            )


EXAMPLES: Mapping[str, str] = {
    "timm": "`vit_tiny_patch16_224`",
    "transformers": "`vit`, a type of model, or `google/vit-base-patch16-224`, a configuration on the hub",
}
