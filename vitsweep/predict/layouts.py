"""Which parallel layout is fastest? All valid ones, pruned by memory, ranked by predicted throughput."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from vitsweep.errors import BadValueError
from vitsweep.predict.closed_memory import Sizes, memory
from vitsweep.predict.closed_trace import closed_trace
from vitsweep.predict.profile_rates import TableRates
from vitsweep.predict.step_time import StepTimePrediction, predict_step
from vitsweep.rates.profile import Profile
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.model_parallel import PipelineParallel, SequenceParallel, TensorParallel
from vitsweep.spec.model_spec import TransformerSpec
from vitsweep.spec.resources import MeshShape
from vitsweep.spec.rules import conflicts
from vitsweep.spec.technique import Memory, Sharding

SHARDINGS = ("ddp", "fsdp", "hsdp")
MOST_MICRO_BATCHES = 128


@dataclass(frozen=True)
class Choices:
    """The techniques that a search combines, by name as typed.

    Attributes:
        sharding: `ddp`, `fsdp`, `hsdp`.
        tensor: `none`, `megatron`.
        pipeline: `none`, `one_f_one_b`.
        sequence: `none`, `ulysses`.
        memory: `keep_all`, `recompute_selected`, `recompute_blocks`.
    """

    sharding: Mapping[str, Sharding]
    tensor: Mapping[str, TensorParallel]
    pipeline: Mapping[str, PipelineParallel]
    sequence: Mapping[str, SequenceParallel]
    memory: Mapping[str, Memory]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout that can run.

    Attributes:
        cell: the cell.
        overrides: what to type for it beside the user's own words.
        prediction: of its step time.
        images_per_second: of all ranks together.
        memory_bytes: predicted peak of a rank.
    """

    cell: CellSpec
    overrides: tuple[str, ...]
    prediction: StepTimePrediction
    images_per_second: float
    memory_bytes: float

    @property
    def interval(self) -> tuple[float, float]:
        """80 % interval of the images per second."""
        images = self.cell.images_per_step
        return 1e3 * images / self.prediction.high_ms, 1e3 * images / self.prediction.low_ms


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search found.

    Attributes:
        ranked: layouts that fit, fastest first.
        considered: combinations of degrees, sharding, recomputation and micro-batches.
        invalid: of these, how many a rule refuses.
        too_large: of the valid ones, how many do not fit into memory.
        least_memory_bytes: of those, the smallest peak; 0 where all fit.
    """

    ranked: list[Candidate]
    considered: int
    invalid: int
    too_large: int
    least_memory_bytes: float


def search_layouts(base: CellSpec, choices: Choices, hardware: Profile) -> Found:
    """Rank all layouts of a cell's model, batch and world.

    Args:
        base: the cell as typed; its parallel techniques, recomputation and degrees are replaced.
        choices: techniques to combine.
        hardware: the device and its network.

    Raises:
        BadValueError: the model is no transformer of equal blocks that compute every image.
    """
    if not isinstance(base.model, TransformerSpec) or base.model.num_sequence_axes > 1:
        raise BadValueError(
            f"`--search layouts` has formulas for plain transformers; `model={base.model.name}` is none: "
            "plan single layouts with `vitsweep plan -m ... --hardware ...`."
        )
    if base.vit_block.draws:
        raise BadValueError(
            f"`--search layouts` has formulas for blocks that compute every image, and `vit_block="
            f"{base.vit_block.name}` leaves some out: plan single layouts with `vitsweep plan -m ... "
            "--hardware ...`, or use `vit_block=plain`."
        )
    rates, limit = TableRates(hardware), hardware.usable_bytes
    ranked, considered, invalid, too_large, least = [], 0, 0, 0, 0.0
    for cell, overrides in candidates(base, choices):
        considered += 1
        if conflicts(cell):
            invalid += 1
            continue
        sizes = Sizes.of(cell)
        needed = memory(sizes).peak
        if needed > limit:
            too_large += 1
            least = min(least or needed, needed)
            continue
        found = predict_step(closed_trace(sizes), rates, tf32=cell.precision.plan().tf32)
        speed = 1e3 * cell.images_per_step / found.step_time_ms
        ranked.append(
            Candidate(
                cell=cell, overrides=overrides, prediction=found, images_per_second=speed,
                memory_bytes=needed,
            )
        )  # fmt: skip
    ranked.sort(key=lambda candidate: -candidate.images_per_second)
    return Found(
        ranked=ranked, considered=considered, invalid=invalid, too_large=too_large,
        least_memory_bytes=least,
    )  # fmt: skip


def candidates(base: CellSpec, choices: Choices) -> Iterator[tuple[CellSpec, tuple[str, ...]]]:
    """Yield every combination as (cell, overrides); rules of the techniques are not yet asked."""
    world, model = base.resources.world_size, base.transformer
    for pipeline, tensor, ulysses in product(divisors(world), repeat=3):
        replicas, rest = divmod(world, pipeline * tensor * ulysses)
        if rest or pipeline > model.depth or model.num_heads % (tensor * ulysses):
            continue
        for sharding, shards in _shardings(replicas, ulysses):
            mesh = MeshShape(
                pipeline=pipeline, replicate=replicas // shards, shard=shards, sequence=1, ring=1,
                ulysses=ulysses, tensor=tensor,
            )  # fmt: skip
            for memory_name in choices.memory:
                yield from _with_micro_batches(base, choices, mesh, sharding, memory_name)


def _shardings(replicas: int, ulysses: int) -> Iterator[tuple[str, int]]:
    yield "ddp", 1
    if replicas * ulysses > 1:
        yield "fsdp", replicas
    for shards in divisors(replicas):
        if shards < replicas and shards * ulysses > 1:
            yield "hsdp", shards


def _with_micro_batches(
    base: CellSpec, choices: Choices, mesh: MeshShape, sharding: str, memory_name: str
) -> Iterator[tuple[CellSpec, tuple[str, ...]]]:
    pipeline = "one_f_one_b" if mesh.pipeline > 1 else "none"
    tensor = "megatron" if mesh.tensor > 1 else "none"
    sequence = "ulysses" if mesh.ulysses > 1 else "none"
    whole = replace(
        base,
        mesh=mesh,
        sharding=choices.sharding[sharding],
        tensor_parallel=choices.tensor[tensor],
        pipeline_parallel=choices.pipeline[pipeline],
        sequence_parallel=choices.sequence[sequence],
        memory=choices.memory[memory_name],
        batch=replace(base.batch, accumulation_steps=1),
    )
    degrees = [
        f"mesh.{axis}={d}" for axis, d in vars(mesh).items() if d > 1 and axis != "replicate"
    ]
    named = [
        f"sharding={sharding}", f"tensor_parallel={tensor}", f"pipeline_parallel={pipeline}",
        f"sequence_parallel={sequence}", f"memory={memory_name}",
    ]  # fmt: skip
    images = whole.micro_batch
    for parts in divisors(images) if images else []:
        if parts > MOST_MICRO_BATCHES:
            break
        if mesh.pipeline > 1:
            schedule = replace(whole.pipeline_parallel, microbatches=parts)  # type: ignore[call-arg]
            cell, knob = (
                replace(whole, pipeline_parallel=schedule),
                "pipeline_parallel.microbatches",
            )
        else:
            cell = replace(whole, batch=replace(whole.batch, accumulation_steps=parts))
            knob = "batch.accumulation_steps"
        yield cell, (*named, *degrees, f"{knob}={parts}")


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]
