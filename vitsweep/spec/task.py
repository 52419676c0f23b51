"""What a cell does with its model: a few measured steps, or training to an accuracy."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from vitsweep.spec.menu import content_of
from vitsweep.spec.technique import OptimizerChoice

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec


WITHOUT_EFFECT = {
    "evaluate_every_epochs": 1, "target_accuracy": None, "checkpoint_minutes": 10.0,
    "keep": "none", "held_out": None,
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
        yield from self._optimizer_conflicts(cell)
        yield from self._augmentation_conflicts(cell)
        yield from self._drop_path_conflicts(cell)

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

    def _optimizer_conflicts(self, cell: "CellSpec") -> Iterator[str]:
        # Muon's updates are as large.
        is_adam = getattr(cell.optimizer, "eps", None) is not None
        if self.learning_rate is not None and not is_adam:
            yield (
                f"`recipe={self.name}` has no learning rate for `optimizer={cell.optimizer.name}`: use an "
                "`optimizer=adamw_...`, or `recipe.learning_rate=null` and `optimizer.learning_rate`."
            )

    def _augmentation_conflicts(self, cell: "CellSpec") -> Iterator[str]:
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

    def _drop_path_conflicts(self, cell: "CellSpec") -> Iterator[str]:
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
