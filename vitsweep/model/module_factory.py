"""A factory of an `nn.Module` of the user's: its settings, and how it is called."""

import json
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from annotated_types import Gt

from vitsweep.spec.from_yaml import Word, built, imported_function, targets_in, title_of
from vitsweep.spec.generators import kept_generators, seeded_generators, set_generators
from vitsweep.spec.model_spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class ModuleFactory(ModelSpec):
    """Any factory of an `nn.Module` that takes images (B, C, H, W) and returns logits (B, classes).

    Where `data` gives mappings, `forward` is called with the entries that it names, by name.

    Attributes:
        target: path of the factory, `package.module.function`, called with keyword arguments.
        arguments: of the factory; a mapping with `_target_` is what the function that it names returns.
        shape_arguments: argument of the factory -> what it is given of the cell: `num_classes`,
            `in_channels` or `resolution_px`.
        passes_name: give the factory `model.name` as its argument `name`.
        blocks: path of what the module stacks, such as `encoder.layers`, or several; `*` stands for any
            letters.
            `auto` takes the list of equal modules with most parameters. Sharding, recomputation and
            compilation work on these.
        output: where in what the module returns the logits are: the key of a dict, the index in a tuple
            (from 0) or an attribute; null where it returns them.
        seams: what the module offers to techniques: `attend` where its attention modules call
            `self.attend(q, k, v)` on tensors (B, heads, T, K), as `vitsweep.model.attention` does.
        twin_arguments: arguments of the small module on which techniques are proved, over
            `arguments`; dropout must be off in it.
        twin_side_px: side of the images of that proof; null for that of the cell.
        loss, loss_count: `objective.target` and `objective.count` of cells from before there were objectives.
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
    blocks: str | tuple[str, ...]
    output: str | int | None
    seams: tuple[Literal["attend"], ...]
    twin_arguments: dict[str, Any] = field(hash=False, metadata={"identity": False})
    twin_side_px: Annotated[int, Gt(0)] | None = field(metadata={"identity": False})
    package: str | None
    version: Annotated[str, Word(r"\w[\w.+-]*")] | None
    loss: str | None = field(default=None, metadata={"identity": "where set", "gone": True})
    twin_batch: str | None = field(default=None, metadata={"identity": False})
    loss_count: str | None = field(default=None, metadata={"identity": "where set", "gone": True})

    norms_over_batch: ClassVar[bool] = True
    """It may have BatchNorm: nobody knows before it is built."""
    draws_by_itself: ClassVar[bool] = True
    draws_its_weights: ClassVar[bool] = True
    may_lack_gradients: ClassVar[bool] = True

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
        named = (target, self.loss, self.loss_count, self.twin_batch, *targets_in(self.arguments))
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

    def example(self, num_images: int, resolution_px: int, seed: int) -> Any:
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
            return factory(**named, **(given | built(self.arguments)))

    def input_shape(self, resolution_px: int) -> tuple[int, ...]:
        """One image."""
        return (self.in_channels, resolution_px, resolution_px)

    def twin(self, depth: int, num_classes: int, unit: int = 1) -> Self:
        """Return the module with `twin_arguments`; without them it is proved in its own size."""
        return replace(self, arguments=self.arguments | self.twin_arguments)

    @property
    def twin_resolution_px(self) -> int | None:
        """Side of the images of the proof."""
        return self.twin_side_px
