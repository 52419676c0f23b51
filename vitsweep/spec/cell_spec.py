"""CellSpec: everything that is asked of one cell, and its identity."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt

from vitsweep.spec.data import Data, Loader
from vitsweep.spec.measurement import Measurement
from vitsweep.spec.model_parallel import PipelineParallel, SequenceParallel, TensorParallel
from vitsweep.spec.model_spec import ModelSpec, TransformerSpec
from vitsweep.spec.model_variant import Averaging, BlockVariant, Schedule, TokenVariant
from vitsweep.spec.resources import MeshShape, Resources
from vitsweep.spec.task import Recipe, Task
from vitsweep.spec.technique import (
    AttentionKernel,
    AttentionPattern,
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


@dataclass(frozen=True, kw_only=True)
class CellSpec:
    """One combination of a sweep."""

    model: ModelSpec
    data: Data
    task: Task
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
        return self.tokens.shape(self.vit_block.shape(self.model, self), self)

    @property
    def transformer(self) -> TransformerSpec:
        """`shape` of a transformer; techniques that need one are refused with other models."""
        shape = self.shape
        if not isinstance(shape, TransformerSpec):
            raise TypeError(f"model={self.model.name} is no transformer")
        return shape

    @property
    def num_tokens(self) -> int | None:
        """Tokens of one image as the blocks see them; None for a model without tokens."""
        return self.shape.num_tokens(self.batch.resolution_px, self.classifier.pooling)

    @property
    def attention_pattern(self) -> AttentionPattern:
        """Which products attention takes, for the FLOPs."""
        return self.attention.attention_pattern

    @property
    def cell_id(self) -> str:
        """Twelve hex digits over all names and values that can change the numbers."""
        return self.id_without()

    def id_without(self, *groups: str) -> str:
        """Return the id of all but some groups: equal for cells that differ in these alone."""
        return _digits({key: value for key, value in identity(self).items() if key not in groups})

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
        return changing | {
            "model": identity(self.model),
            "data": identity(self.data),
            "batch": [self.images_per_step, self.batch.resolution_px, parts if depends else None],
            "classifier": self.classifier.pooling,
            "smoothing": self.task.label_smoothing,
            "seed": self.seed,
        }


GROUPS: Mapping[str, type[Technique]] = {
    field.name: field.type
    for field in fields(CellSpec)
    if isinstance(field.type, type) and issubclass(field.type, Technique) and field.type is not Data
}
"""Config group -> class of its choices, for all groups whose default choice is the plain one."""


def _digits(named: dict[str, Any]) -> str:
    text = json.dumps(named, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def identity(spec: Any) -> dict[str, Any]:
    """Return names and values that decide what is measured, class names included.

    The class name matters: two precisions without fields would otherwise be one cell.
    """
    cls: type = type(spec)
    named: dict[str, Any] = {"kind": cls.__name__}
    for name, counts in _counting_fields(cls):
        value = getattr(spec, name)
        if counts != "where set" or value is not None:
            named[name] = identity(value) if is_dataclass(value) else value
    return named


@cache
def _counting_fields(cls: type) -> Sequence[tuple[str, object]]:
    found = [(field.name, field.metadata.get("identity", True)) for field in fields(cls)]
    return [(name, counts) for name, counts in found if counts]


# A spec as one flat row: choice names under their group, fields dotted below them.


GROUPS_WITH_NAME = ("model", "data", "task", "recipe", "batch", "measurement")


def flatten(cell: CellSpec) -> dict[str, Any]:
    """Return the spec as columns of the record, the ones people filter by first."""
    choices = {group: technique.name for group, technique in cell.techniques.items()}
    parts = {group: getattr(cell, group) for group in GROUPS_WITH_NAME}
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
        for key, value in _spread(f"{group}.{field.name}", getattr(part, field.name))
    }
    return choices | named | plain | {k: _plain(v) for k, v in dotted.items()}


def _spread(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a column for each key of a mapping, and for any other value one."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _spread(f"{key}.{name}", part)
    else:
        yield key, value


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
