"""CellSpec: everything that is asked of one cell, and its identity."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from vitsweep.spec.data import Data, Loader
from vitsweep.spec.measurement import Measurement
from vitsweep.spec.menu import content_of
from vitsweep.spec.model_parallel import PipelineParallel, SequenceParallel, TensorParallel
from vitsweep.spec.model_spec import ModelSpec, TransformerSpec
from vitsweep.spec.model_variant import Averaging, BlockVariant, Schedule, TokenVariant
from vitsweep.spec.objective import Objective
from vitsweep.spec.resources import MeshShape, Resources
from vitsweep.spec.technique import (
    AttentionKernel,
    Classifier,
    Compilation,
    Layout,
    Memory,
    OptimizerChoice,
    Precision,
    Runtime,
    Sharding,
    Technique,
)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Images of one optimizer step.

    Attributes:
        images_per_step: images of one optimizer step, counted as `scope` says.
        scope: `total` over all ranks, or `per_replica` (ranks that share an image count once).
        accumulation_steps: micro-batches per optimizer step.
        resolution_px: side of an image.
    """

    colour: ClassVar[int] = 6

    name: str
    images_per_step: Annotated[int, Gt(0)]
    scope: Literal["total", "per_replica"]
    accumulation_steps: Annotated[int, Gt(0)]
    resolution_px: Annotated[int, Gt(0)]

    def total(self, replicas: int) -> int:
        """Images of one optimizer step over all ranks."""
        return self.images_per_step * (replicas if self.scope == "per_replica" else 1)

    def micro_batch(self, replicas: int) -> int:
        """Images of one forward pass on one replica."""
        return self.total(replicas) // (replicas * self.accumulation_steps)


# What a cell does with its model: a few measured steps, or training to an accuracy.


WITHOUT_EFFECT = {
    "evaluate_every_epochs": 1, "target_accuracy": None, "checkpoint_minutes": 10.0,
    "keep": "none", "held_out": None, "resume_from": None,
}  # fmt: skip
"""Settings that nothing reads without a training, as `task=measure` has them."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """`measure` (epochs=0: only the steps of `measurement`) or `train` (epochs > 0).

    Attributes:
        epochs: passes over the training images after the measured steps; 0 trains no further.
        warmup_epochs: epochs of linear learning-rate warm-up, then half a cosine.
        label_smoothing: epsilon of the smoothed cross entropy (Szegedy et al., arXiv:1512.00567).
        evaluate_every_epochs: epochs between evaluations; 0 evaluates the trained model only.
        target_accuracy: top-1 whose time is recorded in `seconds_to_target`; None for no target.
        checkpoint_minutes: time between two checkpoints; None writes one only when interrupted.
        resume_from: folder of a checkpoint of another cell (see `training.checkpoint_files.checkpoints_in`),
            from which the training goes on; its ranks, mesh, sharding and precision may be others.
        keep: the weights that a training leaves in a file: those after the last epoch, or none.
        held_out: path of a function (outputs, batch) -> mapping of name -> tensor (B, ...), which is kept
            of each held-out image, after training, for metrics of one's own; None keeps nothing.
    """

    name: str
    epochs: Annotated[int, Ge(0)]
    warmup_epochs: Annotated[float, Ge(0)]
    label_smoothing: Annotated[float, Ge(0), Le(1)]
    evaluate_every_epochs: Annotated[int, Ge(0)]
    target_accuracy: Annotated[float, Gt(0), Le(1)] | None
    checkpoint_minutes: Annotated[float, Gt(0)] | None = field(metadata={"identity": False})
    resume_from: str | None
    keep: Literal["final", "none"] = field(default="none", metadata={"identity": False})
    held_out: str | None = field(default=None, metadata={"identity": False})

    def conflicts(self) -> Iterator[str]:
        """Yield which settings of a training have no effect, where there is none, and where epochs are."""
        if self.name == "measure" and self.epochs:
            yield (
                f"`task.epochs={self.epochs}` has no effect with `task=measure`, which does not train: use "
                f"`task=train task.epochs={self.epochs}`."
            )
        if self.name == "train" and not self.epochs:
            yield "`task=train` with `task.epochs=0` trains nothing: give epochs, or use `task=measure`."
        if self.epochs or self.name == "train":
            return
        for key, default in WITHOUT_EFFECT.items():
            value = getattr(self, key)
            if value != default:
                shown = (
                    "null" if value is None else value if isinstance(value, str) else f"{value:g}"
                )
                typed = f"`task.{key}={shown}`"
                yield f"{typed} has no effect with `task={self.name}`: use `task=train`, or leave it out."


# A training recipe: learning rate, regularization and augmentation of `task=train`.


OPTIMIZER_FIELDS = ("learning_rate", "weight_decay", "clip_norm")
"""Fields of the optimizer that a recipe replaces while it trains."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained to an accuracy; the timed steps of `measurement` do not use it.

    Attributes:
        epochs: where `task.epochs=auto`.
        warmup_epochs: where `task.warmup_epochs=auto`.
        label_smoothing: where `task.label_smoothing=auto`.
        learning_rate: peak, instead of the optimizer's; None keeps that.
        learning_rate_images: batch for which `learning_rate` is meant: it is multiplied by
            `images_per_step` / this (Goyal et al., arXiv:1706.02677); None does not scale it.
        weight_decay: instead of the optimizer's; None keeps that.
        clip_norm: instead of the optimizer's; None keeps that.
        mixup_alpha: of the Beta distribution by which pairs of images are averaged (Zhang et al.,
            arXiv:1710.09412); 0 mixes none.
        cutmix_alpha: of the same for boxes of an image in another (Yun et al., arXiv:1905.04899). With
            both, each step draws one of them.
        rand_augment_ops: random distortions of each image (Cubuk et al., arXiv:1909.13719).
        rand_augment_magnitude: their strength, 0 to 10.
        erase_probability: share of images of which a rectangle becomes noise (Zhong et al.,
            arXiv:1708.04896).
        drop_path: share of images for which the last block's branches are left out, in a line from 0
            at the first block (stochastic depth, Huang et al., arXiv:1603.09382).
        learning_rate_schedule: of timm or pycls, which hold the rate for an epoch (see
            `training.epochs.learning_rate`); None changes it from step to step.
    """

    name: str
    epochs: Annotated[int, Gt(0)]
    warmup_epochs: Annotated[float, Ge(0)]
    label_smoothing: Annotated[float, Ge(0), Le(1)]
    learning_rate: Annotated[float, Gt(0)] | None
    learning_rate_images: Annotated[int, Gt(0)] | None
    weight_decay: Annotated[float, Ge(0)] | None
    clip_norm: Annotated[float, Gt(0)] | None
    mixup_alpha: Annotated[float, Ge(0)]
    cutmix_alpha: Annotated[float, Ge(0)]
    rand_augment_ops: Annotated[int, Ge(0)]
    rand_augment_magnitude: Annotated[float, Ge(0), Le(10)]
    erase_probability: Annotated[float, Ge(0), Le(1)]
    drop_path: Annotated[float, Ge(0), Lt(1)]
    learning_rate_schedule: Literal["timm", "pycls"] | None = field(
        default=None, metadata={"identity": "where set"}
    )

    @property
    def mixes(self) -> bool:
        """Whether images of a batch are mixed with one another, and labels become shares of classes."""
        return self.mixup_alpha > 0 or self.cutmix_alpha > 0

    @property
    def augments(self) -> bool:
        """Whether training images are changed at all."""
        return self.mixes or self.rand_augment_ops > 0 or self.erase_probability > 0

    def optimizer(self, cell: "CellSpec") -> OptimizerChoice:
        """Return the optimizer with which the cell trains: its own with this recipe's values."""
        values: dict[str, Any] = {
            name: getattr(self, name)
            for name in OPTIMIZER_FIELDS
            if getattr(self, name) is not None
        }
        if self.learning_rate is not None and self.learning_rate_images is not None:
            values["learning_rate"] *= cell.images_per_step / self.learning_rate_images
        return replace(cell.optimizer, **values)

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Yield reasons why the recipe cannot train this cell, or would have no effect."""
        if not cell.task.epochs:  # `Task` refuses a training without epochs
            yield from () if cell.task.name == "train" else self._without_effect(cell.task.name)
            return
        task = cell.task
        if task.epochs < task.warmup_epochs != self.warmup_epochs:
            yield (
                f"`task.warmup_epochs={task.warmup_epochs:g}` is more than `task.epochs={task.epochs}`, so "
                "that the learning rate never reaches its peak: use fewer, or more epochs."
            )
        # Muon's updates are as large.
        is_adam = getattr(cell.optimizer, "eps", None) is not None
        if self.learning_rate is not None and not is_adam:
            yield (
                f"`recipe={self.name}` has no learning rate for `optimizer={cell.optimizer.name}`: use an "
                "`optimizer=adamw_...`, or `recipe.learning_rate=null` and `optimizer.learning_rate`."
            )
        if self.augments and getattr(cell.data, "num_frames", 1) > 1:
            yield (
                f"`recipe={self.name}` needs single images with one label, not `data={cell.data.name}`: use "
                "`recipe=none`."
            )
        if self.mixes and cell.micro_batch % 2:
            yield (
                f"`recipe={self.name}` mixes pairs, not a micro-batch of {cell.micro_batch}: use another "
                "`batch.images_per_step`, or `recipe.mixup_alpha=0 recipe.cutmix_alpha=0`."
            )
        if not self.drop_path:
            return
        if cell.vit_block.draws:
            yield (
                f"`recipe.drop_path={self.drop_path:g}` and `vit_block={cell.vit_block.name}` both drop "
                "branches: use `recipe.drop_path=0`, or `vit_block=plain`."
            )
        for group in ("sequence_parallel", "tensor_parallel", "pipeline_parallel"):
            choice = getattr(cell, group).name
            if choice != "none":
                yield f"`recipe.drop_path={self.drop_path:g}` needs `{group}=none`: use `recipe.drop_path=0`."

    def _without_effect(self, task: str) -> Iterator[str]:
        plain = content_of("recipe", "none")
        changed = {k: value for k, none in plain.items() if (value := getattr(self, k)) != none}
        if not changed:
            return
        typed = [f"`recipe={self.name}`"]
        if self.name == "none":
            typed = [f"`recipe.{key}={value}`" for key, value in changed.items()]
        has = "have" if len(typed) > 1 else "has"
        yield f"{' and '.join(typed)} {has} no effect with `task={task}`: use `task=train`, or leave it out."


# The cell.


@dataclass(frozen=True, kw_only=True)
class CellSpec:
    """One combination of a sweep."""

    model: ModelSpec
    data: Data
    task: Task
    objective: Objective = field(metadata={"identity": "unless default"})
    recipe: Recipe
    batch: Batch
    resources: Resources
    mesh: MeshShape
    precision: Precision
    sharding: Sharding
    optimizer: OptimizerChoice
    layout: Layout
    classifier: Classifier
    attention: AttentionKernel
    sequence_parallel: SequenceParallel
    tensor_parallel: TensorParallel
    pipeline_parallel: PipelineParallel
    memory: Memory
    compilation: Compilation
    loader: Loader
    runtime: Runtime
    vit_block: BlockVariant
    tokens: TokenVariant
    averaging: Averaging
    schedule: Schedule
    measurement: Measurement
    seed: Annotated[int, Ge(0)]

    @property
    def techniques(self) -> dict[str, Technique]:
        """Group name -> chosen technique, in the order of the record."""
        return {group: getattr(self, group) for group in GROUPS}

    @property
    def images_per_step(self) -> int:
        """Images of one optimizer step over all ranks."""
        return self.batch.total(self.mesh.data_parallel_size)

    @property
    def micro_batch(self) -> int:
        """Images of one forward pass on one replica."""
        replicas = max(1, self.mesh.data_parallel_size)  # 0 where the mesh does not fit the world
        return self.batch.micro_batch(replicas)

    @property
    def images_per_forward(self) -> int:
        """Images of one forward pass through a block: those of a micro-batch of the pipeline."""
        return max(1, self.micro_batch // self.pipeline_parallel.microbatches)

    @property
    def shape(self) -> ModelSpec:
        """The model as it is trained: its shape with what techniques change of it."""
        if not isinstance(self.model, TransformerSpec):
            return self.model
        return self.tokens.shape(self.vit_block.shape(self.model, self), self)

    @property
    def transformer(self) -> TransformerSpec:
        """`shape` of a transformer; techniques that need one are refused with other models."""
        shape = self.shape
        if not isinstance(shape, TransformerSpec):
            raise TypeError(f"model={self.model.name} is no transformer")
        return shape

    @property
    def loss_function(self) -> str | None:
        """Path of a function in place of the objective's own loss; of an older cell its `model.loss`."""
        found: str | None = getattr(self.objective, "target", None)
        return found or getattr(self.model, "loss", None)

    @property
    def loss_count(self) -> str | None:
        """Path of the function that says over how many values the loss is a sum; None for a mean."""
        found: str | None = getattr(self.objective, "count", None)
        return found or getattr(self.model, "loss_count", None)

    @property
    def num_tokens(self) -> int | None:
        """Tokens of one image as the blocks see them; None for a model without tokens."""
        return self.shape.num_tokens(self.batch.resolution_px, self.classifier.pooling)

    @property
    def cell_id(self) -> str:
        """Twelve hex digits over all names and values that can change the numbers (see `identity`).

        Device and launcher are outside: records say on which device a cell ran. Threads of a rank are
        inside, and `auto` takes them from the cores.
        """
        return self.id_without()

    def id_without(self, *groups: str) -> str:
        """Return the id of all but some groups: equal for cells that differ in these alone."""
        return _digits({key: value for key, value in identity(self).items() if key not in groups})

    @property
    def of_command(self) -> dict[str, dict[str, Any]]:
        """Group -> field -> value of all settings outside of the id: they belong to the command."""
        found = {}
        for group, part in vars(self).items():
            cls: type = type(part)
            if names := outside_id(cls):
                found[group] = {name: getattr(part, name) for name in names}
        return found

    @property
    def twin(self) -> dict[str, Any]:
        """No twin of a proof: the `twin_settings` of its row."""
        names = self.of_command.get("model", {})
        return twin_settings({k: v for n in names for k, v in spread(f"model.{n}", names[n])})

    @property
    def id_of_first_loss(self) -> str:
        """Id of what decides the loss of the first step: equal cells have it within rounding."""
        return _digits(self._of_first_loss())

    @property
    def id_of_losses(self) -> str:
        """Id of what decides the losses of the steps after it: the definition of the optimizer as well."""
        optimizer = identity(self.optimizer.plain()) | {"name": ""}
        return _digits(self._of_first_loss() | {"optimizer": optimizer})

    def _of_first_loss(self) -> dict[str, Any]:
        changing = {g: identity(t) for g, t in self.techniques.items() if t.changes_model}
        parts = [self.mesh.data_parallel_size, self.batch.accumulation_steps]
        parts += [self.pipeline_parallel.microbatches]
        depends = self.model.norms_over_batch or self.vit_block.draws or self.tokens.draws
        # what an objective draws belongs to an image, and depends on no part
        return (
            changing
            | {
                "model": identity(self.model),
                "data": identity(self.data),
                "batch": [
                    self.images_per_step,
                    self.batch.resolution_px,
                    parts if depends else None,
                ],
                "classifier": self.classifier.pooling,
                "smoothing": self.task.label_smoothing,
                "seed": self.seed,
            }
            | ({} if self.objective.is_default else {"objective": identity(self.objective)})
        )


GROUPS: Mapping[str, type[Technique]] = {
    field.name: field.type
    for field in fields(CellSpec)
    if isinstance(field.type, type) and issubclass(field.type, Technique) and field.type is not Data
}
"""Config group -> class of its choices, for all groups whose choice in `config.yaml` changes nothing."""


def _digits(named: dict[str, Any]) -> str:
    text = json.dumps(named, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def identity(spec: Any) -> dict[str, Any]:
    """Return names and values that decide what is measured, class names included.

    The class name matters: two precisions without fields would otherwise be one cell. A field's metadata
    `identity` says whether it counts: True, as without it; False; `where set`, unless it is None; `unless
    default`, unless it has its default. The last two keep the ids of cells from before there was the field.
    """
    cls: type = type(spec)
    named: dict[str, Any] = {"kind": cls.__name__}
    for name, counts, default in _counting_fields(cls):
        value = getattr(spec, name)
        is_left_out = (
            value is None
            if counts == "where set"
            else counts == "unless default"
            and (value.is_default if isinstance(value, Objective) else value == default)
        )
        if not is_left_out:
            named[name] = identity(value) if is_dataclass(value) else value
    return named


@cache
def outside_id(cls: type) -> Sequence[str]:
    """Return the fields of a part of a cell that its id leaves out; those that are derived are none."""
    found = fields(cls) if is_dataclass(cls) else ()
    return [
        f.name for f in found if not (f.metadata.get("identity", True) or f.metadata.get("derived"))
    ]


@cache
def _counting_fields(cls: type) -> Sequence[tuple[str, object, object]]:
    found = [(f.name, f.metadata.get("identity", True), f.default) for f in fields(cls)]
    return [each for each in found if each[1]]


# A spec as one flat row: choice names under their group, fields dotted below them.


GROUPS_WITH_NAME = ("model", "data", "task", "objective", "recipe", "batch", "measurement")


def flatten(cell: CellSpec) -> dict[str, Any]:
    """Return the spec as columns of the record, the ones people filter by first."""
    choices = {group: technique.name for group, technique in cell.techniques.items()}
    parts = {group: getattr(cell, group) for group in GROUPS_WITH_NAME}
    if cell.objective.is_default:  # rows from before there were others lack it
        del parts["objective"]
    named = {group: getattr(part, "title", part.name) for group, part in parts.items()}
    plain = {
        "half_dtype": getattr(cell.precision, "half_dtype", None),
        "images_per_step": cell.images_per_step,
        "accumulation_steps": cell.batch.accumulation_steps,
        "resolution_px": cell.batch.resolution_px,
        "num_tokens": cell.num_tokens,
        "nodes": cell.resources.nodes,
        "ranks_per_node": cell.resources.ranks_per_node,
        "world_size": cell.resources.world_size,
        "seed": cell.seed,
    }
    dotted = {
        key: value
        for group in (f.name for f in fields(cell) if f.name != "seed")
        for part in [getattr(cell, group)]
        for field in fields(part)
        if field.name != "name" and not field.metadata.get("derived")
        for key, value in spread(f"{group}.{field.name}", getattr(part, field.name))
    }
    return choices | named | plain | {k: _plain(v) for k, v in dotted.items()}


def twin_settings(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a row of `flatten` says of the small module on which techniques are proved."""
    return {k: v for k, v in row.items() if k.startswith("model.twin_") and v is not None}


def spread(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a column for each key of a mapping, and for any other value one."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from spread(f"{key}.{name}", part)
    else:
        yield key, value


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
