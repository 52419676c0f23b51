"""Proof of equality: a tiny twin of a cell, trained with its techniques, must match reference training."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitsweep.model.build import first_model
from vitsweep.model.initialize import plain_name
from vitsweep.model.module_look import as_it_was
from vitsweep.model.module_spec import ModuleSpec
from vitsweep.parallelize import parallelize
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.techniques.averaging.ema import Ema
from vitsweep.training.faults import (
    ALONE,
    BACKWARD,
    EITHER,
    FORWARD,
    LEAST,
    MODULE,
    START,
    UPDATE,
    agree,
    digits_lost,
    furthest,
    longer,
    minus,
    norms_of,
    typical_norm,
    wide,
)
from vitsweep.training.optimizer_definitions import (
    ByEquations,
    PlainImplementation,
    Update,
    is_elementwise,
    series_apart,
)
from vitsweep.training.reference import (
    HALF,
    ROUNDOFF,
    PlainModel,
    PlainStep,
    RoundingNoise,
    plain_model,
)
from vitsweep.training.shards import Named, whole_tensors
from vitsweep.training.trainer import MicroBatch
from vitsweep.training.twin import (
    Parts,
    exact_twin,
    global_batch,
    mean_over_replicas,
    my_share,
    not_proved,
    parts_of,
    step_that_counts,
    twin_of,
)
from vitsweep.training.update import names_in_blocks
from vitsweep.world import World

STEPS = 4
EXACT = 1e-8
"""Relative difference that sums in another order leave in float64, with six digits to spare."""
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
BIT_FOR_BIT = "bit for bit in float64"
MANY_NUMBERS = (256, 257)
"""Shape of a matrix of more than 2**16 numbers, as many as multi-tensor kernels take at a time."""
TINY = 1e-6
"""Share of a typical norm below which no gradient is looked at: true zeros, as of the key's bias."""


@as_it_was()
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
    told += leg.parts.told
    if left_out := not_proved(cell):
        told.append(f"not proved: {', '.join(left_out)}")
    return "; ".join(told)


def prove(cell: CellSpec, world: World, *, exactly: bool = True) -> float:
    """Train twins of the cell on its own ranks; compare every step of every rank with reference training.

    The first twin computes in float64 (float32 on GPUs), so that whatever is wrong in any
    precision is far outside of its bounds. The second one has the cell's precision, and is compared
    with the reference in that precision. The reference model begins each step at the weights that
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
    parts = parts_of(exact_twin(twin), world)
    if exactly:
        _prove_optimizer(twin, world)
        exact = _Leg(exact_twin(twin), world, parts)
        exact.run()
        if exact_twin(twin) == twin:
            return exact
        bit_for_bit = exact.bit_for_bit
    leg = _Leg(twin, world, parts.rounded, bit_for_bit)
    leg.run()
    return leg


def _prove_optimizer(twin: CellSpec, world: World) -> None:
    """Refuse an optimizer whose weights or state leave its equations in a long series of updates."""
    choice = twin.optimizer
    large = nn.Linear(*MANY_NUMBERS)
    many = nn.ModuleDict({"blocks": nn.Sequential(large)})  # optimizers may treat blocks separately
    many.to(world.device)
    fault = series_apart(plain_model(twin, world.device), choice) or series_apart(many, choice, 4)
    agree([(ALONE, fault)], "alone", twin)


class _Leg:
    """One twin and the reference model in its precision.

    Attributes:
        parts: how the reference model computes a batch.
        worst: largest relative difference of a loss.
        bit_for_bit: whether its gradients in float64 were the reference model's to the last bit.
    """

    def __init__(self, twin: CellSpec, world: World, parts: Parts, same_bits: bool = False) -> None:
        self._twin, self._world, self._plan = twin, world, twin.precision.plan()
        self.parts = parts
        self.worst, self.bit_for_bit = 0.0, same_bits or self._is_exact
        self._trainer = parallelize(first_model(twin), twin, world)
        self._plain = PlainModel(twin, world.device, parts.are_computed)
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
        """The optimizer's equations; where these are unknown or rounded, its reference implementation."""
        choice, stored = self._twin.optimizer, self._stored_dtype
        implementation = PlainImplementation(choice, names_in_blocks(self._plain.model))
        if not is_elementwise(choice):
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
        return max(4 * ROUNDOFF[stored], own), 0.5 * ROUNDOFF[stored]

    @property
    def _stored_dtype(self) -> torch.dtype:
        """Of the weights that the optimizer updates."""
        return getattr(torch, "float32" if self._plan.master_weights else self._plan.param_dtype)

    @property
    def _rounds(self) -> bool:
        """Whether weights and state are rounded to half precision, by known equations."""
        return self._stored_dtype in HALF and is_elementwise(self._twin.optimizer)

    def lost_by_storing(self) -> float | None:
        """Distance of all updates from those without rounding, relative to these; None without rounding."""
        apart, size = self._squares
        return (apart / size) ** 0.5 if size else None

    def run(self) -> None:
        """Take the steps."""
        held, seen = self._held(), self._seen()
        average = {n: wide(w) for n, w in held.items()}
        start = {plain_name(n): p.detach() for n, p in self._plain.model.named_parameters()}
        faults = [(START, self._weights_apart("first weight", seen, start))]
        # constants, which each step takes from the twin
        if isinstance(self._twin.model, ModuleSpec):
            first = {plain_name(n): b for n, b in self._plain.model.named_buffers()}
            faults.insert(0, (START, self._buffers_apart(first)))
        # moves the reference model's running statistics
        faults.append((MODULE, self._half_apart(seen)))
        agree(faults, "before the first step", self._twin)
        inside = BACKWARD if self._is_exact else EITHER
        for step in range(STEPS):
            batch, buffers = global_batch(self._twin, step, self._world), self._buffers()
            loss, gradients = self._train(batch, step)
            before, held, seen_before, seen = held, self._held(), seen, self._seen()
            average = self._averaged(average, before, held, step)
            plain, noisy = self._references(seen_before, buffers, batch, step)
            self.worst = max(self.worst, abs(loss - float(plain.loss)) / abs(float(plain.loss)))
            faults = [
                (FORWARD, self._loss_apart(loss, float(plain.loss))),
                (inside, self._gradients_apart(gradients, plain, noisy)),
                (EITHER, self._buffers_apart(plain.buffers)),
                (UPDATE, self._update_apart(before, held, gradients)),
                (UPDATE, self._weights_apart("weight that the model reads", seen, held)),
                (UPDATE, self._averages_apart(average, held)),
            ]
            agree(faults, f"in step {step + 1}", self._twin)
        faults = [(EITHER, self._lengths_apart()), (EITHER, self._orders_apart())]
        agree(faults, f"over {STEPS} steps", self._twin)

    def _train(self, batch: MicroBatch, step: int) -> tuple[float, Named]:
        """Take one step; return the mean loss and the gradients."""
        trainer, gradients = self._trainer, Named()

        def keep() -> None:
            """Keep what the update reads; of a step repeated after an overflow, its last gradients."""
            found = whole_tensors(trainer, trainer.gradient_of)
            gradients.update({name: gradient.clone() for name, gradient in found.items()})

        trainer.before_update = keep
        loss = step_that_counts(trainer, my_share(self._twin, batch, self._world), step)
        return mean_over_replicas(loss, self._world), gradients

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
        """Return the reference step, and one under rounding noise; the first and last rank compute them."""
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
        """Send a reference step from the rank that computed it to all others."""
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
            f"loss {found:.5f} differs from the reference's {wanted:.5f} by {apart:.2g}, where rounding "
            f"explains {allowed:g} at most,"
        )

    def _gradients_apart(self, found: Named, plain: PlainStep, noisy: PlainStep | None) -> str:
        """Compare gradients by the noise that rounding leaves in each tensor."""
        wanted = plain.gradients
        norms = norms_of(wanted)
        typical = typical_norm(norms)
        if noisy is not None:
            noise = norms_of(minus(noisy.gradients, wanted))
            self._noise = {n: size / typical for n, size in noise.items()}
        apart = norms_of(minus(found, wanted))
        if self._noise is None:
            bounds = {n: EXACT * max(norm, LEAST * typical) for n, norm in norms.items()}
            self.bit_for_bit &= not any(apart.values())
        else:
            own = self._own_rounding
            # A CPU sums a vector's gradient over all tokens, one by one. Those of pooled tokens are equal,
            # and so may their rounding errors be: n u / 2 of n equal terms (Higham, "Accuracy and Stability
            # of Numerical Algorithms", section 4.2); 100 u were seen of 512 tokens.
            num_rows = self._twin.images_per_step * (self._twin.num_tokens or 1)
            summed = num_rows * ROUNDOFF[torch.float32] / 2
            bounds = {
                n: (NOISE_TIMES * self._noise[n] + TINY) * typical
                + (own + summed * (wanted[n].dim() == 1)) * norm
                for n, norm in norms.items()
            }
            for name, share in longer(found, wanted, norms).items():
                self._longer.setdefault(name, []).append(share)
            self._shares += [apart[n] / bounds[n] for n in norms]
        told = furthest("gradient", apart, bounds, norms)
        return told or self._digits_lost(found, wanted)

    def _orders_apart(self) -> str:
        """Compare all gradients with rounding where the twin computes in the reference model's order.

        It does where the float64 of a CPU was the same bit for bit; a GPU may have kernels of another order
        in half precision, a compiler keeps more digits between operations, shards of masters are given more
        digits by their exchange, and float8 has few.
        """
        twin = self._twin
        widened = twin.sharding.shards_parameters and self._plan.master_weights
        few_digits = twin.precision.float8 or getattr(twin.sharding, "gradient_dtype", None)
        rounds_apart = any(choice.rounds_apart for choice in twin.techniques.values())
        other_order = self._world.device.type != "cpu" or rounds_apart
        if not (self.bit_for_bit and self._shares) or widened or few_digits or other_order:
            return ""
        apart = (sum(share * share for share in self._shares) / len(self._shares)) ** 0.5
        if apart <= SAME_ORDER:
            return ""
        return (
            f"gradients differ from the reference's by {apart:.3g} of their bounds (root mean square over "
            f"tensors), where float64 gave the same bit for bit and this allows {SAME_ORDER:g} at most (a "
            "choice whose kernels round elsewhere says `rounds_apart = True`),"
        )

    def _digits_lost(self, found: Named, wanted: Named) -> str:
        """Say which gradient was rounded to half precision on its way, where the reference's is not."""
        sent = getattr(self._twin.sharding, "gradient_dtype", None)
        if sent or self._stored_dtype != torch.float32:
            return ""
        return digits_lost(found, wanted)

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
            f"gradients are longer or shorter than the reference's by {apart:.3g} (root mean square over "
            f"tensors), where rounding explains {allowed:.3g} at most,"
        )

    def _update_apart(self, before: Named, held: Named, gradients: Named) -> str:
        """Compare the update with what the optimizer's definition makes of the same gradients."""
        used = {n: g for n, g in gradients.items() if n in self._trained}
        found, wanted = minus(held, before), Named()
        for update in self._updates:  # the nearest of these, for each tensor
            defined = minus({**before, **update(before, used)}, before)
            for name, moved in defined.items():
                nearest = wanted.setdefault(name, moved)
                if nearest is moved:
                    continue
                if (found[name] - moved).norm() < (found[name] - nearest).norm():
                    wanted[name] = moved
        if self._unrounded:
            ideal = minus({**before, **self._unrounded(before, used)}, before)
            for kind, tensors in enumerate((minus(found, ideal), ideal)):
                self._squares[kind] += sum(norm * norm for norm in norms_of(tensors).values())
        norms, weights = norms_of(wanted), norms_of(held)
        relative, stored = self._update_rounding
        bounds = {n: relative * norms[n] + stored * weights[n] for n in norms}
        return furthest("update", norms_of(minus(found, wanted)), bounds, norms)

    def _averaged(self, average: Named, before: Named, held: Named, step: int) -> Named:
        """Return the exponential moving average after a step; each skipped update averages `before` again."""
        choice, skipped = self._twin.averaging, len(self._trainer.skipped)
        repeats, self._skipped = max(0, skipped - self._skipped - 1), skipped
        if not isinstance(choice, Ema) or (step + 1) % choice.every:
            return average
        number = step // choice.every
        decay = min(choice.decay, (1 + number) / (10 + number)) if choice.warmup else choice.decay
        for weights in [*[before] * repeats, held]:
            average = {n: decay * a + (1 - decay) * wide(weights[n]) for n, a in average.items()}
        return average

    def _averages_apart(self, wanted: Named, held: Named) -> str:
        """Compare the weights that evaluation would read with their average."""
        if not isinstance(self._twin.averaging, Ema):
            return ""
        with self._trainer.averaged_weights():
            found = self._held()
        relative, stored = self._update_rounding
        moved, norms = norms_of(minus(wanted, held)), norms_of(wanted)
        bounds = {n: relative * moved[n] + 4 * stored * norms[n] for n in norms}
        return furthest("average of the weights", norms_of(minus(found, wanted)), bounds, norms)

    def _half_apart(self, weights: Named) -> str:
        """Compare a module of the user's in half precision with itself in float32.

        It may compute something else under autocast, or where it is cast; the reference model does so then.
        """
        twin, plan = self._twin, self._plan
        in_half = plan.autocast_dtype or (plan.param_dtype if plan.master_weights else None)
        if not isinstance(twin.model, ModuleSpec) or in_half is None:
            return ""
        exact_cell = replace(twin, precision=exact_twin(twin).precision)
        unrounded = PlainModel(exact_cell, self._world.device, self.parts.are_computed)
        batch, buffers = global_batch(twin, 0, self._world), self._buffers()
        exact = unrounded.step(weights, buffers, batch, 0).gradients
        plain, noisy = self._references(weights, buffers, batch, 0)
        assert noisy is not None
        norms, noise = norms_of(exact), norms_of(minus(noisy.gradients, plain.gradients))
        typical = typical_norm(norms)
        bounds = {n: HALF_TIMES * noise[n] + self._own_rounding * typical for n in norms}
        apart = norms_of(minus(plain.gradients, exact))
        return furthest("reference gradient in half", apart, bounds, norms)

    def _buffers_apart(self, wanted: Named) -> str:
        """Compare the buffers of the first replica; other replicas may be given its own."""
        if not wanted or self._world.data_parallel_rank:
            return ""
        found = {n: b for n, b in self._buffers().items() if n in wanted}
        norms = norms_of({n: wanted[n] for n in found})
        allowed = EXACT if self._is_exact else 8 * self._roundoff
        bounds = {n: allowed * norm for n, norm in norms.items()}
        apart = norms_of(minus(found, {n: wanted[n] for n in found}))
        return furthest("buffer", apart, bounds, norms)

    def _weights_apart(self, what: str, found: Named, wanted: Named) -> str:
        """Compare weights that are equal but for one rounding to their dtype."""
        norms = norms_of(wanted)
        half = getattr(torch, self._plan.param_dtype) in HALF
        allowed = 1.01 * ROUNDOFF[getattr(torch, self._plan.param_dtype)] if half else 0.0
        bounds = {n: allowed * norm for n, norm in norms.items()}
        return furthest(what, norms_of(minus(found, wanted)), bounds, norms)
