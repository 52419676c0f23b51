"""Proof of equality: a tiny twin of a cell, trained with its techniques, must match plain training."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import lcm
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from vitsweep.collectives.primitives import gathered
from vitsweep.errors import VitsweepError
from vitsweep.model.build import first_model
from vitsweep.model.initialize import plain_name
from vitsweep.model.module_spec import ModuleSpec
from vitsweep.model.user_module import example_of
from vitsweep.parallelize import parallelize
from vitsweep.spec.cell_spec import GROUPS, CellSpec
from vitsweep.spec.measurement import Batch
from vitsweep.spec.menu import class_of, plain_choice
from vitsweep.spec.model_spec import TransformerSpec, least_alike
from vitsweep.spec.model_variant import Averaging, ModelVariant
from vitsweep.spec.technique import PHASES, AttentionKernel, OptimizerChoice, Technique
from vitsweep.techniques.attention.sdpa import HALF_ONLY
from vitsweep.techniques.averaging.ema import Ema
from vitsweep.techniques.optimizer.muon import Muon
from vitsweep.techniques.precision.full import FullPrecision
from vitsweep.training.optimizer_definitions import (
    EQUATIONS,
    ByEquations,
    PlainImplementation,
    Update,
    series_apart,
)
from vitsweep.training.reference import (
    HALF,
    ROUNDOFF,
    PlainModel,
    PlainStep,
    RoundingNoise,
    cut,
    plain_model,
    shares_of,
)
from vitsweep.training.shards import Named, whole_tensors
from vitsweep.training.trainer import WARM_UP_STEPS, MicroBatch, Trainer
from vitsweep.training.update import names_in_blocks
from vitsweep.world import World

STEPS = 4
HALVINGS = 20
"""Overflows in a row until a dynamic loss scale is low enough: from 2**16 to below 1."""
LEAST_SIDE = 6
"""Patches along a side of the twin's images, unless the cell has fewer."""
EXACT = 1e-8
"""Relative difference that sums in another order leave in float64, with six digits to spare."""
LEAST = 1e-2
"""A gradient is measured by its norm, and a nearly vanishing one by this share of a typical norm."""
NOISE_TIMES = 2.0
"""So many times the effect of `RoundingNoise` on a tensor's gradient rounding may have."""
HALF_TIMES = 6.0
"""The same between half precision and float32, where rounding errors of a sum need not be independent."""
FLOAT32_TIMES = 16
"""Roundoffs of a gradient's norm that its sums leave in float32: 8.4 in a convolution over all patches."""
FEW_TENSORS = 8
"""Lengths of so many gradients may be twice as far off as those of very many."""
MOST_ROUNDING = 0.4
"""Relative error of a gradient under float8 (three bits): half or twice of it is 0.5 and 1 away."""
SAME_ORDER = 0.05
"""Share of their bounds (root mean square) by which gradients differ that are computed in the same order."""
LEAST_LOSS = 1e-5
"""Relative difference of losses that float32 may leave; 4 u where that is more."""
MOST_NUMBERS = 0.5
"""Share of a float32 gradient's numbers beyond half precision; of a sum of two in half precision few are."""
FEW_NUMBERS = 16
"""So many numbers may have the digits of half precision by chance."""
BIT_FOR_BIT = "bit for bit in float64"
MANY_NUMBERS = (256, 257)
"""Shape of a matrix of more than 2**16 numbers, as many as multi-tensor kernels take at a time."""
TINY = 1e-6
"""Share of a typical norm below which no gradient is looked at: true zeros, as of the key's bias."""


@dataclass(frozen=True)
class Place:
    """Where a difference shows first.

    Attributes:
        words: for the message.
        phases: of a step; the choices that touch one of them may be at fault.
        groups: of these choices.
    """

    words: str
    phases: Sequence[str] = PHASES[1:]  # the twin reads no data
    groups: Collection[str] = tuple(GROUPS)


START = Place("in what training begins with")
MODULE = Place("in the module of your own without techniques", groups=("precision",))
FORWARD = Place("in the forward pass", ("forward",))
BACKWARD = Place("in the backward pass, where the loss agrees", ("backward",))
EITHER = Place(
    "in the forward or the backward pass, by less than the loss shows", ("forward", "backward")
)
UPDATE = Place("in the update, where loss and gradients agree", ("optimizer",))
ALONE = Place("in the optimizer alone", ("optimizer",), ("optimizer",))
ACTING = ("sharding", "optimizer")
"""Groups whose plain choice does something too."""


class WrongResultError(VitsweepError):
    """A cell trained with its techniques has other losses than plain training."""


def twin_of(cell: CellSpec) -> CellSpec:
    """Return the cell with a nano model and a few images per replica, everything else kept.

    Images, widths and classes have the remainders of the cell's, so that what is padded there is padded here.
    FP8 products need a number of rows divisible by 16: 16 computed images are, whatever the tokens.
    """
    stages = cell.mesh.pipeline * cell.pipeline_parallel.stages_per_rank
    ranks = lcm(cell.mesh.gradient_shares, cell.mesh.tensor)
    classes = least_alike(cell.model.num_classes, max(16, cell.mesh.data_parallel_size), ranks)
    model = cell.model.twin(depth=max(3, stages + 1), num_classes=classes, unit=ranks)
    parts = cell.pipeline_parallel.microbatches
    least = max(cell.vit_block.least_images, cell.tokens.least_images)
    # Of one forward pass.
    images = least_alike(cell.images_per_forward, max(-(-4 // parts), least), 4)
    if cell.precision.float8:
        images = next(n for n in count(max(16, least)) if cell.vit_block.kept(n) % 16 == 0)
    batch = Batch(
        name="twin",
        images_per_step=parts * images * cell.batch.accumulation_steps,
        scope="per_replica",
        accumulation_steps=cell.batch.accumulation_steps,
        resolution_px=cell.model.twin_resolution_px or cell.batch.resolution_px,
    )
    # torch's compiler takes no buckets below 1 MiB, which a nano model does not fill
    compiled = cell.compilation.scope != "nothing"
    sharding = cell.sharding if compiled else cell.sharding.of_twin()
    precision = cell.precision.of_twin()
    twin = replace(cell, model=model, batch=batch, precision=precision, sharding=sharding)
    return _padded_alike(twin, cell)


def _padded_alike(twin: CellSpec, cell: CellSpec) -> CellSpec:
    """Return the twin with images on which it pads tokens as the cell does; at most those of the cell.

    Sequences have the same remainder as the cell's modulo all degrees that share tokens, and more
    than 32 tokens where the cell has as many.
    """
    if not isinstance(twin.model, TransformerSpec) or not isinstance(cell.model, TransformerSpec):
        return twin
    unit = 2 * lcm(cell.mesh.ring, cell.mesh.ulysses, cell.mesh.sequence, cell.mesh.tensor)
    pooling, own_px, patch = cell.classifier.pooling, cell.batch.resolution_px, cell.model.patch_px
    wanted = cell.shape.sequence_lengths(own_px, pooling)  # type: ignore[attr-defined]
    for side in range(min(LEAST_SIDE * patch, own_px), own_px, patch):
        smaller = replace(twin, batch=replace(twin.batch, resolution_px=side))
        found = smaller.transformer.sequence_lengths(side, pooling)
        if all((f - w) % unit == 0 for f, w in zip(found, wanted, strict=True)):
            return smaller
    return replace(twin, batch=replace(twin.batch, resolution_px=own_px))


def exact_twin(twin: CellSpec) -> CellSpec:
    """Return the twin with all of its techniques in float64, or in float32 where that may be missing.

    What only half precision has is replaced: flash kernels of a GPU, gradients that are exchanged in it,
    weights that are rounded to it at random.
    """
    on_gpu = twin.resources.device == "cuda"
    may_lack_it = on_gpu or twin.model.norms_over_batch
    is_there = twin.precision.plan().param_dtype == "float64"
    dtype: Literal["float32", "float64"] = "float32" if may_lack_it and not is_there else "float64"
    exact = FullPrecision(name=dtype, dtype=dtype, tf32=False)
    is_exact = twin.precision.plan() == exact.plan()
    changed: dict[str, Any] = {"precision": twin.precision if is_exact else exact}
    if getattr(twin.sharding, "gradient_dtype", None):
        changed["sharding"] = replace(twin.sharding, gradient_dtype=None)  # type: ignore[call-arg]
    if getattr(twin.optimizer, "stochastic_rounding", False):
        changed["optimizer"] = replace(twin.optimizer, stochastic_rounding=False)  # type: ignore[call-arg]
    if on_gpu and getattr(twin.attention, "backend", None) in HALF_ONLY:
        changed["attention"] = replace(twin.attention, backend="math", flash_kernel="torch")  # type: ignore[call-arg]
    return replace(twin, **changed)


def proof_of(cell: CellSpec, world: World, earlier: str = "") -> str:
    """Prove a cell (see `prove`), and return what its record says of that.

    Args:
        cell: the cell.
        world: its ranks; every rank calls this function.
        earlier: what this function returned for a cell that differs in its precision alone, and whose
            comparison in float64 serves this one too; "" where there is none.
    """
    leg = _proved(cell, world, not earlier, BIT_FOR_BIT in earlier)
    told = [f"twin {leg.worst:.1e}"] + [BIT_FOR_BIT] * leg.bit_for_bit
    if (lost := leg.lost_by_storing()) is not None:
        told.append(f"updates {lost:.2g} of their norm from float32's")
    if left_out := not_proved(cell):
        told.append(f"not proved: {', '.join(left_out)}")
    return "; ".join(told)


def prove(cell: CellSpec, world: World, *, exactly: bool = True) -> float:
    """Train twins of the cell on its own ranks; compare every step of every rank with plain training.

    The first twin computes in float64 (float32 on GPUs), so that whatever is wrong in any
    precision is far outside of its bounds. The second one has the cell's precision, and is compared
    with the plain model in that precision. The plain model begins each step at the weights that
    the twin has then: what differs is due to this one step. Compared are

    - the loss and, tensor by tensor, the averaged, unscaled and clipped gradients,
    - the update of every tensor, with what the optimizer's equations make of these very gradients,
    - the weights that the next forward pass reads, with those that the optimizer updates,
    - buffers.

    The optimizer is proved once more alone, see `training.optimizer_definitions.series_apart`.

    Args:
        cell: the cell.
        world: its ranks; every rank calls this function.
        exactly: False where a cell that differs in its precision alone was proved in float64.

    Returns:
        The largest relative difference of a loss in the cell's precision.

    Raises:
        WrongResultError: something differs by more than rounding explains.
    """
    return _proved(cell, world, exactly).worst


def _proved(cell: CellSpec, world: World, exactly: bool, bit_for_bit: bool = False) -> "_Leg":
    """Run the twins; return the one in the cell's precision."""
    twin = twin_of(cell)
    if exactly:
        _prove_optimizer(twin, world)
        exact = _Leg(exact_twin(twin), world)
        exact.run()
        if exact_twin(twin) == twin:
            return exact
        bit_for_bit = exact.bit_for_bit
    leg = _Leg(twin, world, bit_for_bit)
    leg.run()
    return leg


def not_proved(cell: CellSpec) -> list[str]:
    """Return the choices of a cell of which the proof does not see all."""
    known = type(cell.averaging) in (Averaging, Ema)
    found = [] if known else [f"averaging={cell.averaging.name}"]
    own = {g: t.name for g, t in cell.techniques.items() if _is_compared_with_itself(t)}
    found += [f"{group}={name}, which is compared with itself" for group, name in own.items()]
    if cell.task.epochs:
        found.append(f"task={cell.task.name} after the timed steps")
    if cell.compilation.captures_step:
        found.append(f"gradients under compilation={cell.compilation.name}")
    if type(cell.optimizer.plain()) not in EQUATIONS:
        found.append(f"optimizer={cell.optimizer.name}, which is compared with its own `plain`")
    return found


def _is_compared_with_itself(choice: Technique) -> bool:
    """Whether a choice changes the model and brings no plain code of the same."""
    no_code = type(choice).plain_twin in (ModelVariant.plain_twin, AttentionKernel.plain_twin)
    does_nothing = getattr(type(choice), "apply", None) is ModelVariant.apply  # a shape alone
    return choice.changes_model and no_code and not does_nothing


def _is_elementwise(choice: OptimizerChoice) -> bool:
    """Whether equations of every number alone define the optimizer."""
    return type(choice.plain()) in EQUATIONS and not isinstance(choice, Muon)


def _prove_optimizer(twin: CellSpec, world: World) -> None:
    """Refuse an optimizer whose weights or state leave its equations in a long series of updates.

    Stochastic rounding, which would hide small ones, is left to the twin in its own precision.
    """
    choice = exact_twin(twin).optimizer
    with torch.random.fork_rng(
        devices=[]
    ):  # of the CPU alone: a rank must not touch all GPUs of a node
        large = nn.Linear(*MANY_NUMBERS)
    many = nn.ModuleDict({"blocks": nn.Sequential(large)})  # optimizers may treat blocks apart
    many.to(world.device)
    fault = series_apart(plain_model(twin, world.device), choice) or series_apart(many, choice, 4)
    _agree([(ALONE, fault)], "alone", twin)


class _Leg:
    """One twin beside the plain model in its precision.

    Attributes:
        worst: largest relative difference of a loss.
        bit_for_bit: whether its gradients in float64 were the plain model's to the last bit.
    """

    def __init__(self, twin: CellSpec, world: World, bit_for_bit: bool = False) -> None:
        self._twin, self._world, self._plan = twin, world, twin.precision.plan()
        self.worst, self.bit_for_bit = 0.0, bit_for_bit or self._is_exact
        self._trainer = parallelize(first_model(twin), twin, world)
        self._plain = PlainModel(twin, world.device)
        self._trained = {
            plain_name(n) for n, p in self._plain.model.named_parameters() if p.requires_grad
        }
        self._updates = self._definitions()
        self._noise: dict[str, float] | None = None
        self._longer: dict[str, list[float]] = {}
        self._shares: list[float] = []
        self._unrounded = ByEquations(twin.optimizer, torch.float64) if self._rounds else None
        self._squares = [0.0, 0.0]
        self._skipped = 0

    def _definitions(self) -> list[Update]:
        """The optimizer's equations; where these are unknown or rounded, its plain implementation."""
        choice, stored = self._twin.optimizer, self._stored_dtype
        known = _is_elementwise(choice)
        implementation = PlainImplementation(choice, names_in_blocks(self._plain.model))
        if not known:
            return [implementation]
        if stored in HALF:
            return [ByEquations(choice, torch.float32, stored), implementation]
        return [ByEquations(choice, torch.float64)]

    @property
    def _is_exact(self) -> bool:
        return self._plan.param_dtype == "float64"

    @property
    def _roundoff(self) -> float:
        """Unit roundoff of the coarsest products of a forward pass."""
        if self._plan.tf32:
            return ROUNDOFF[torch.float16]  # as many digits
        return ROUNDOFF[getattr(torch, self._plan.autocast_dtype or self._plan.param_dtype)]

    @property
    def _own_rounding(self) -> float:
        """Relative error of gradients that are stored or sent in few bits."""
        if self._twin.precision.float8:
            return MOST_ROUNDING
        sent = getattr(self._twin.sharding, "gradient_dtype", None)
        own = FLOAT32_TIMES if self._roundoff == ROUNDOFF[torch.float32] else 2
        return max(2 * ROUNDOFF[getattr(torch, sent)] if sent else 0.0, own * self._roundoff)

    @property
    def _update_rounding(self) -> tuple[float, float]:
        """Relative error of an update, and error of the stored weights in parts of these."""
        choice, stored = self._twin.optimizer, self._stored_dtype
        own = 15 * choice.relative_tolerance()
        if stored == torch.float64:
            return max(EXACT, own), torch.finfo(stored).eps
        if stored == torch.float32:  # decay and step are rounded
            return max(1e-4, own), 2 * ROUNDOFF[stored]
        times = 2.0 if getattr(choice, "stochastic_rounding", False) else 0.5
        return max(4 * ROUNDOFF[stored], own), times * ROUNDOFF[stored]

    @property
    def _stored_dtype(self) -> torch.dtype:
        """Of the weights that the optimizer updates."""
        return getattr(torch, "float32" if self._plan.master_weights else self._plan.param_dtype)

    @property
    def _rounds(self) -> bool:
        """Whether weights and state are rounded to half precision, by known equations."""
        return self._stored_dtype in HALF and _is_elementwise(self._twin.optimizer)

    def lost_by_storing(self) -> float | None:
        """Distance of all updates from those without rounding, relative to these; None without rounding."""
        apart, size = self._squares
        return (apart / size) ** 0.5 if size else None

    def run(self) -> None:
        """Take the steps."""
        held, seen = self._held(), self._seen()
        average = {n: _wide(w) for n, w in held.items()}
        start = {plain_name(n): p.detach() for n, p in self._plain.model.named_parameters()}
        faults = [(START, self._weights_apart("first weight", seen, start))]
        if isinstance(
            self._twin.model, ModuleSpec
        ):  # constants, which each step takes from the twin
            first = {plain_name(n): b for n, b in self._plain.model.named_buffers()}
            faults.insert(0, (START, self._buffers_apart(first)))
        # moves the plain model's running statistics
        faults.append((MODULE, self._half_apart(seen)))
        _agree(faults, "before the first step", self._twin)
        inside = BACKWARD if self._is_exact else EITHER
        for step in range(STEPS):
            batch, buffers = _global_batch(self._twin, step, self._world), self._buffers()
            loss, gradients = self._train(batch, step)
            before, held, seen_before, seen = held, self._held(), seen, self._seen()
            average = self._averaged(average, before, held, step)
            plain, noisy = self._references(seen_before, buffers, batch, step)
            self.worst = max(self.worst, abs(loss - float(plain.loss)) / abs(float(plain.loss)))
            faults = [
                (FORWARD, self._loss_apart(loss, float(plain.loss))),
                (inside, self._gradients_apart(gradients or plain.gradients, plain, noisy)),
                (EITHER, self._buffers_apart(plain.buffers)),
                (UPDATE, self._update_apart(before, held, gradients, plain.gradients)),
                (UPDATE, self._weights_apart("weight that the model reads", seen, held)),
                (UPDATE, self._averages_apart(average, held)),
            ]
            _agree(faults, f"in step {step + 1}", self._twin)
        faults = [(EITHER, self._lengths_apart()), (EITHER, self._orders_apart())]
        _agree(faults, f"over {STEPS} steps", self._twin)

    def _train(self, batch: MicroBatch, step: int) -> tuple[float, Named]:
        """Take one step; return the mean loss, and the gradients unless the step is replayed."""
        trainer, gradients = self._trainer, Named()

        def keep() -> None:
            """Keep what the update reads; of a step repeated after an overflow, its last gradients."""
            found = whole_tensors(trainer, trainer.gradient_of)
            gradients.update({name: gradient.clone() for name, gradient in found.items()})

        replayed = trainer.captured is not None and step >= WARM_UP_STEPS
        trainer.before_update = None if replayed else keep
        loss = _step_that_counts(trainer, _my_share(self._twin, batch, self._world), step)
        return _mean_over_replicas(loss, self._world), gradients

    def _seen(self) -> Named:
        """Copies of the whole weights that forward passes read."""
        return {n: w.clone() for n, w in whole_tensors(self._trainer, lambda p: p).items()}

    def _held(self) -> Named:
        """Copies of the whole weights that the optimizer updates."""
        trainer = self._trainer

        def master(parameter: nn.Parameter) -> Tensor:
            return trainer.masters.of(parameter) if trainer.masters else parameter

        def held(parameter: nn.Parameter) -> Tensor | None:
            return trainer.cell.sharding.gradient_of(trainer.model, parameter, master)

        with torch.no_grad():
            return {n: w.clone() for n, w in whole_tensors(trainer, held).items()}

    def _buffers(self) -> Named:
        return {plain_name(n): b.clone() for n, b in self._trainer.model.named_buffers()}

    def _references(
        self, weights: Named, buffers: Named, batch: MicroBatch, step: int
    ) -> tuple[PlainStep, PlainStep | None]:
        """Return the plain step, and one under rounding noise; the first and the last rank compute them."""
        rank, last = self._world.rank, self._world.size - 1
        draws = not self._is_exact and step == 0
        plain = noisy = None
        if rank == 0:
            plain = self._plain.step(weights, buffers, batch, step)
        if draws and rank == last:
            with RoundingNoise(step, self._roundoff if self._plan.tf32 else 0.0):
                noisy = self._plain.step(weights, buffers, batch, step)
        return self._shared(plain, 0), self._shared(noisy, last) if draws else None

    def _shared(self, found: PlainStep | None, owner: int) -> PlainStep:
        """Send a plain step from the rank that computed it to all others."""
        if not dist.is_initialized() or self._world.size == 1:
            assert found is not None
            return found
        shapes = {n: p for n, p in self._plain.named_parameters().items() if p.requires_grad}
        dtype = torch.float64 if self._is_exact else torch.float32
        packed = torch.zeros(1 + sum(p.numel() for p in shapes.values()), dtype=dtype)
        packed = packed.to(self._world.device)
        if found is not None:
            none = torch.zeros((), dtype=dtype, device=self._world.device)
            grads = [found.gradients.get(n, none).expand(p.shape) for n, p in shapes.items()]
            packed = torch.cat([t.reshape(-1).to(dtype) for t in (found.loss, *grads)])
        dist.broadcast(packed, owner)
        loss, *parts = packed.split([1, *(p.numel() for p in shapes.values())])
        gradients = {n: g.view(p.shape) for (n, p), g in zip(shapes.items(), parts, strict=True)}
        return found or PlainStep(loss[0], gradients, {})

    def _loss_apart(self, found: float, wanted: float) -> str:
        if self._is_exact:
            allowed = EXACT
        elif self._twin.precision.float8:
            allowed = self._twin.precision.relative_tolerance()
        else:
            allowed = max(LEAST_LOSS, 4 * self._roundoff)
        apart = abs(found - wanted) / abs(wanted)
        if apart <= allowed:  # a NaN is not
            return ""
        return (
            f"loss {found:.5f} differs from plain training's {wanted:.5f} by {apart:.2g}, where rounding "
            f"explains {allowed:g} at most,"
        )

    def _gradients_apart(self, found: Named, plain: PlainStep, noisy: PlainStep | None) -> str:
        """Compare gradients by the noise that rounding leaves in each tensor."""
        wanted = plain.gradients
        norms = _norms(wanted)
        typical = _typical(norms)
        if noisy is not None:
            noise = _norms(_minus(noisy.gradients, wanted))
            self._noise = {n: size / typical for n, size in noise.items()}
        apart = _norms(_minus(found, wanted))
        if self._noise is None:
            bounds = {n: EXACT * max(norm, LEAST * typical) for n, norm in norms.items()}
            self.bit_for_bit &= not any(apart.values())
        else:
            own = self._own_rounding
            bounds = {
                n: (NOISE_TIMES * self._noise[n] + TINY) * typical + own * norm
                for n, norm in norms.items()
            }
            for name, share in _longer(found, wanted, norms).items():
                self._longer.setdefault(name, []).append(share)
            self._shares += [apart[n] / bounds[n] for n in norms]
        told = _furthest("gradient", apart, bounds, norms)
        return told or self._digits_lost(found, wanted)

    def _orders_apart(self) -> str:
        """Compare all gradients with rounding where the twin computes in the plain model's order.

        It does where the float64 of a CPU was the same bit for bit; a GPU may have kernels of another order
        in half precision, a compiler keeps more digits between operations, shards of masters are given more
        digits by their exchange, and float8 has few.
        """
        twin = self._twin
        widened = twin.sharding.shards_parameters and self._plan.master_weights
        few_digits = twin.precision.float8 or getattr(twin.sharding, "gradient_dtype", None)
        other_order = self._world.device.type != "cpu" or twin.compilation.fuses_kernels
        if not (self.bit_for_bit and self._shares) or widened or few_digits or other_order:
            return ""
        apart = (sum(share * share for share in self._shares) / len(self._shares)) ** 0.5
        if apart <= SAME_ORDER:
            return ""
        return (
            f"gradients differ from plain training's by {apart:.3g} of their bounds (root mean square over "
            f"tensors), where float64 gave the same bit for bit and this allows {SAME_ORDER:g} at most,"
        )

    def _digits_lost(self, found: Named, wanted: Named) -> str:
        """Say which gradient was rounded to half precision on its way, where plain training's is not."""
        sent = getattr(self._twin.sharding, "gradient_dtype", None)
        if sent or self._stored_dtype != torch.float32:
            return ""
        lost = (
            n
            for n in wanted
            if n in found and not _beyond_half(found[n]) and _beyond_half(wanted[n]) > MOST_NUMBERS
        )
        if (name := next(lost, None)) is None:
            return ""
        return (
            f"gradient of `{name}` has the digits of half precision in all of its numbers, where plain "
            "training's has those of float32,"
        )

    def _lengths_apart(self) -> str:
        """Compare lengths of gradients over all steps: signs of rounding errors differ from step to step."""
        means = [sum(shares) / len(shares) for shares in self._longer.values()]
        if not means:
            return ""
        apart = (sum(mean * mean for mean in means) / len(means)) ** 0.5
        allowed = max(LEAST_LOSS, self._own_rounding / 2) * (1 + FEW_TENSORS / len(means))
        if apart <= allowed:
            return ""
        return (
            f"gradients are longer or shorter than plain training's by {apart:.3g} (root mean square over "
            f"tensors), where rounding explains {allowed:.3g} at most,"
        )

    def _update_apart(self, before: Named, held: Named, gradients: Named, plain: Named) -> str:
        """Compare the update with what the optimizer's definition makes of the same gradients."""
        if not gradients and not self._is_exact:
            return ""  # of a replayed step, which gives no gradients
        used = {n: g for n, g in (gradients or plain).items() if n in self._trained}
        found, wanted = _minus(held, before), Named()
        for update in self._updates:  # the nearest of these, for each tensor
            defined = _minus({**before, **update(before, used)}, before)
            for name, moved in defined.items():
                nearest = wanted.setdefault(name, moved)
                if nearest is moved:
                    continue
                if (found[name] - moved).norm() < (found[name] - nearest).norm():
                    wanted[name] = moved
        if self._unrounded:
            ideal = _minus({**before, **self._unrounded(before, used)}, before)
            for kind, tensors in enumerate((_minus(found, ideal), ideal)):
                self._squares[kind] += sum(norm * norm for norm in _norms(tensors).values())
        norms, weights = _norms(wanted), _norms(held)
        relative, stored = self._update_rounding
        bounds = {n: relative * norms[n] + stored * weights[n] + self._ties(n) for n in norms}
        return _furthest("update", _norms(_minus(found, wanted)), bounds, norms)

    def _averaged(self, average: Named, before: Named, held: Named, step: int) -> Named:
        """Return the exponential moving average after a step; each skipped update averages `before` again."""
        choice, skipped = self._twin.averaging, len(self._trainer.skipped)
        repeats, self._skipped = max(0, skipped - self._skipped - 1), skipped
        if not isinstance(choice, Ema) or (step + 1) % choice.every:
            return average
        number = step // choice.every
        decay = min(choice.decay, (1 + number) / (10 + number)) if choice.warmup else choice.decay
        for weights in [*[before] * repeats, held]:
            average = {n: decay * a + (1 - decay) * _wide(weights[n]) for n, a in average.items()}
        return average

    def _averages_apart(self, wanted: Named, held: Named) -> str:
        """Compare the weights that evaluation would read with their average."""
        if not isinstance(self._twin.averaging, Ema):
            return ""
        with self._trainer.averaged_weights():
            found = self._held()
        relative, stored = self._update_rounding
        moved, norms = _norms(_minus(wanted, held)), _norms(wanted)
        bounds = {n: relative * moved[n] + 4 * stored * norms[n] for n in norms}
        return _furthest("average of the weights", _norms(_minus(found, wanted)), bounds, norms)

    def _ties(self, name: str) -> float:
        state = getattr(self._updates[0], "state", {}).get(name, {})
        return float(state.get("ties", 0.0))

    def _half_apart(self, weights: Named) -> str:
        """Compare a module of the user's in half precision with itself in float32.

        It may compute something else under autocast, or where it is cast, and so does the plain model then.
        """
        twin, plan = self._twin, self._plan
        in_half = plan.autocast_dtype or (plan.param_dtype if plan.master_weights else None)
        if not isinstance(twin.model, ModuleSpec) or in_half is None:
            return ""
        wide = PlainModel(replace(twin, precision=exact_twin(twin).precision), self._world.device)
        batch, buffers = _global_batch(twin, 0, self._world), self._buffers()
        exact = wide.step(weights, buffers, batch, 0).gradients
        plain, noisy = self._references(weights, buffers, batch, 0)
        assert noisy is not None
        norms, noise = _norms(exact), _norms(_minus(noisy.gradients, plain.gradients))
        typical = _typical(norms)
        bounds = {n: HALF_TIMES * noise[n] + self._own_rounding * typical for n in norms}
        apart = _norms(_minus(plain.gradients, exact))
        return _furthest("plain gradient in half", apart, bounds, norms)

    def _buffers_apart(self, wanted: Named) -> str:
        """Compare the buffers of the first replica; other replicas may be given its own."""
        if not wanted or self._world.data_parallel_rank:
            return ""
        found = {n: b for n, b in self._buffers().items() if n in wanted}
        norms = _norms({n: wanted[n] for n in found})
        allowed = EXACT if self._is_exact else 8 * self._roundoff
        bounds = {n: allowed * norm for n, norm in norms.items()}
        apart = _norms(_minus(found, {n: wanted[n] for n in found}))
        return _furthest("buffer", apart, bounds, norms)

    def _weights_apart(self, what: str, found: Named, wanted: Named) -> str:
        """Compare weights that are equal but for one rounding to their dtype."""
        norms = _norms(wanted)
        half = getattr(torch, self._plan.param_dtype) in HALF
        allowed = 1.01 * ROUNDOFF[getattr(torch, self._plan.param_dtype)] if half else 0.0
        bounds = {n: allowed * norm for n, norm in norms.items()}
        return _furthest(what, _norms(_minus(found, wanted)), bounds, norms)


def _agree(faults: Sequence[tuple[Place, str]], when: str, twin: CellSpec) -> None:
    """Raise on all ranks the first of the faults that some rank found."""
    own = next(((number, text) for number, (_, text) in enumerate(faults) if text), None)
    found = [(*fault, rank) for rank, fault in enumerate(gathered(own)) if fault]
    if not found:
        return
    number, text, rank = min(found, key=lambda fault: (fault[0], fault[2]))
    place = faults[number][0]
    suspects = ", ".join([*_touching(twin, place), "this hardware"])
    raise WrongResultError(
        f"The nano twin's {text} {when} in {twin.precision.name} (rank {rank}). It shows first "
        f"{place.words}: {' or '.join(suspects.rsplit(', ', 1))} computes something else."
    )


def _touching(twin: CellSpec, place: Place) -> list[str]:
    """Return the choices that change what is computed there, as typed."""
    found = []
    for group, choice in twin.techniques.items():
        plain = plain_choice(group)
        is_plain = (choice.name, type(choice)) == (plain, class_of(group, plain))
        is_exact = group == "precision" and choice == exact_twin(twin).precision
        does_nothing = choice.name == "none" or is_exact or (is_plain and group not in ACTING)
        if not does_nothing and group in place.groups and {*place.phases} & {*choice.touches}:
            found.append(f"`{group}={choice.name}`")
    if "backward" in place.phases and (limit := twin.optimizer.clip_norm) is not None:
        found.append(f"`optimizer.clip_norm={limit:g}`")
    return found


def _norms(tensors: Named) -> dict[str, float]:
    """Return name -> L2 norm, computed in float64 and read at once."""
    if not tensors:
        return {}
    norms = torch.stack([_wide(t.detach()).norm() for t in tensors.values()])
    return dict(zip(tensors, norms.tolist(), strict=True))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128) if tensor.is_complex() else tensor.double()


def _typical(norms: dict[str, float]) -> float:
    """Return the root mean square."""
    return (sum(n * n for n in norms.values()) / len(norms)) ** 0.5


def _minus(these: Named, those: Named) -> Named:
    """Return differences by the names of `those`, in float64; what is missing counts as zero."""
    return {
        n: (_wide(these[n].reshape(t.shape)) if n in these else 0) - _wide(t)
        for n, t in those.items()
    }


def _beyond_half(tensor: Tensor) -> float:
    """Share of the numbers with more than 11 binary digits (bfloat16: 8); 0 of few, by chance less."""
    if tensor.numel() < FEW_NUMBERS:
        return 0.0
    return float((tensor.float().view(torch.int32) & 0x1FFF != 0).double().mean())


def _longer(found: Named, wanted: Named, norms: dict[str, float]) -> dict[str, float]:
    """By what share each gradient that does not nearly vanish is longer in its own direction."""
    least = LEAST * _typical(norms)
    large = {n: wanted[n] for n, norm in norms.items() if norm > least and n in found}
    apart = _minus(found, large)
    if not large:
        return {}
    shares = [(apart[n] * _wide(g)).sum().real / norms[n] ** 2 for n, g in large.items()]
    return dict(zip(large, torch.stack(shares).tolist(), strict=True))


def _furthest(
    what: str, apart: dict[str, float], bounds: dict[str, float], norms: dict[str, float]
) -> str:
    """Say which tensor is furthest outside of its bound; "" where none is."""
    outside = {n: d for n, d in apart.items() if not d <= bounds[n]}  # a NaN is outside
    if not outside:
        return ""
    name = max(outside, key=lambda n: outside[n] / (bounds[n] or 1e-300))
    size = norms[name] or 1.0
    return (
        f"{what} of `{name}` differs from plain training's by {outside[name] / size:.3g} of its norm (L2), "
        f"where rounding explains {bounds[name] / size:.3g} at most,"
    )


def _step_that_counts(trainer: Trainer, micro_batches: list[MicroBatch], step: int) -> torch.Tensor:
    """Repeat a step until no overflow skips its update; the loss is the same each time.

    A dynamic loss scale starts too high and halves until gradients fit float16.
    """
    for _ in range(HALVINGS):
        trainer.steps_taken = step
        loss = trainer.step(iter(micro_batches))
        skipped = trainer.skipped[-1].clone() if trainer.skipped else torch.zeros(())
        if trainer.skipped and dist.is_initialized():  # so that all ranks take as many steps
            dist.all_reduce(skipped, dist.ReduceOp.MAX)
        if not bool(skipped):
            break
    return loss


def _global_batch(twin: CellSpec, step: int, world: World) -> MicroBatch:
    """Images (B, C, H, W) and labels (B,), or a mapping, of all shares, the same on every rank."""
    number = twin.images_per_step // twin.mesh.data_parallel_size * shares_of(twin)
    if isinstance(twin.model, ModuleSpec) and twin.model.twin_batch:
        px, seed = twin.batch.resolution_px, 1000 * twin.seed + step
        batch = example_of(twin.model, number, px, seed)
        return tree_map_only(Tensor, lambda tensor: tensor.to(world.device), batch)
    generator = torch.Generator().manual_seed(1000 * twin.seed + step)
    side, model = twin.batch.resolution_px, twin.model
    shape = (number, *model.input_shape(side))
    images = torch.randn(shape, generator=generator)
    if model.head == "dense":
        labels = torch.randn((shape[0], model.num_classes, side, side), generator=generator)
    else:
        labels = torch.randint(model.num_classes, (shape[0],), generator=generator)
        images += _patterns(shape[1:], model.num_classes)[labels]  # something to learn
    return images.to(world.device), labels.to(world.device)


def _patterns(shape: tuple[int, ...], classes: int) -> torch.Tensor:
    return torch.randn((classes, *shape), generator=torch.Generator().manual_seed(0))


def _my_share(twin: CellSpec, batch: MicroBatch, world: World) -> list[MicroBatch]:
    replicas, shares = world.data_parallel_size, shares_of(twin)
    mine = cut(batch, shares)[_share_of_replicas(replicas, shares)[world.data_parallel_rank]]
    return cut(mine, twin.batch.accumulation_steps)


def _share_of_replicas(replicas: int, shares: int) -> list[int]:
    """Return which share each replica computes: each equally often, and the first replica the first one.

    They come in no order, so that no node or other group of ranks has the mean of all.
    """
    if shares == replicas:
        return [*range(replicas)]
    order = torch.randperm(replicas, generator=torch.Generator().manual_seed(0)) % shares
    found: list[int] = ((order - order[0]) % shares).tolist()
    return found


def _mean_over_replicas(loss: torch.Tensor, world: World) -> float:
    total = loss.clone()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= world.size
    return float(total)
