"""What is compared: checks (found, expected, bounds) -> what differs, "" where nothing does.

A check that needs what earlier steps gave is an object, made anew for each twin.
"""

from dataclasses import replace

import torch
from torch import Tensor

from vitsweep.model.initialize import plain_name
from vitsweep.model.module_spec import ModuleSpec
from vitsweep.proof.evidence import Evidence, Reference
from vitsweep.proof.faults import furthest, minus, norms_of, typical_norm, wide
from vitsweep.proof.optimizer_definitions import ByEquations, definitions_of, is_elementwise
from vitsweep.proof.reference import HALF, ROUNDOFF, PlainModel
from vitsweep.proof.twin import exact_twin, global_batch
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.techniques.optimizer.muon import Muon
from vitsweep.training.shards import Named
from vitsweep.training.update import names_in_blocks
from vitsweep.world import World

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
TINY = 1e-6
"""Share of a typical norm below which no gradient is looked at: true zeros, as of the key's bias."""
LEAST = 1e-2
"""A gradient is measured by its norm, and a nearly vanishing one by this share of a typical norm."""
FEW_NUMBERS = 16
"""So many numbers may have the digits of half precision by chance."""
MOST_NUMBERS = 0.5
"""Share of a float32 gradient's numbers beyond half precision; of a sum of two in half precision few are."""


class Bounds:
    """What rounding explains in the precision of a twin.

    Args:
        twin: gives the precision, and the choices that round.
        world: its ranks.

    Attributes:
        twin: the same.
        world: the same.
        plan: what the precision means.
        is_exact: whether the twin computes in float64.
        stored: dtype of the weights that the optimizer updates.
        sent: dtype in which gradients are exchanged, where it is not their own.
    """

    def __init__(self, twin: CellSpec, world: World) -> None:
        self.twin, self.world, self.plan = twin, world, twin.precision.plan()
        self.is_exact = self.plan.param_dtype == "float64"
        stored = "float32" if self.plan.master_weights else self.plan.param_dtype
        self.stored: torch.dtype = getattr(torch, stored)
        self.sent: str | None = getattr(twin.sharding, "gradient_dtype", None)

    @property
    def roundoff(self) -> float:
        """Unit roundoff of the coarsest products of a forward pass."""
        if self.plan.tf32:
            return ROUNDOFF[torch.float16]  # as many digits
        return ROUNDOFF[getattr(torch, self.plan.autocast_dtype or self.plan.param_dtype)]

    @property
    def own_rounding(self) -> float:
        """Relative error of gradients that are stored or sent in few bits."""
        if self.twin.precision.float8:
            return MOST_ROUNDING
        own = FLOAT32_TIMES if self.roundoff == ROUNDOFF[torch.float32] else 2
        sent = 2 * ROUNDOFF[getattr(torch, self.sent)] if self.sent else 0.0
        return max(sent, own * self.roundoff)

    @property
    def update_rounding(self) -> tuple[float, float]:
        """Relative error of an update, and error of the stored weights in parts of these."""
        choice, stored = self.twin.optimizer, self.stored
        own = 15 * choice.relative_tolerance()
        if stored == torch.float64:
            own *= not isinstance(choice, Muon)
            return max(EXACT, own), torch.finfo(stored).eps
        if stored == torch.float32:  # decay and step are rounded
            return max(1e-4, own), 2 * ROUNDOFF[stored]
        return max(4 * ROUNDOFF[stored], own), 0.5 * ROUNDOFF[stored]

    def gradients(self, wanted: Named, noise: dict[str, float]) -> dict[str, float]:
        """Return how far off each gradient may be, by the noise of each in parts of their typical norm."""
        norms = norms_of(wanted)
        typical = typical_norm(norms)
        if self.is_exact:
            return {n: EXACT * max(norm, LEAST * typical) for n, norm in norms.items()}
        # A CPU sums a vector's gradient over all tokens, one by one. Those of pooled tokens are equal,
        # and so may their rounding errors be: n u / 2 of n equal terms (Higham, "Accuracy and Stability
        # of Numerical Algorithms", section 4.2); 100 u were seen of 512 tokens.
        num_rows = self.twin.images_per_step * (self.twin.num_tokens or 1)
        summed = num_rows * ROUNDOFF[torch.float32] / 2
        return {
            n: (NOISE_TIMES * noise[n] + TINY) * typical
            + (self.own_rounding + summed * (wanted[n].dim() == 1)) * norm
            for n, norm in norms.items()
        }

    def update(self, moved: Named, weights: Named, roundings: int = 1) -> dict[str, float]:
        """Return how far off each tensor may be that moved so far, to weights that were rounded so often."""
        (relative, stored), norms = self.update_rounding, norms_of(weights)
        return {n: relative * m + roundings * stored * norms[n] for n, m in norms_of(moved).items()}

    def apart(self, what: str, found: Named, wanted: Named, bound: float | dict[str, float]) -> str:
        """Say which tensor of `wanted` is furthest outside of its bound; "" where none is.

        Args:
            what: is compared, for the message.
            found: by the reference model's names.
            wanted: by the same.
            bound: distance of each tensor (L2), or share of all norms.
        """
        norms = norms_of(wanted)
        if isinstance(bound, float):
            bound = {n: bound * norm for n, norm in norms.items()}
        return furthest(what, norms_of(minus(found, wanted)), bound, norms)


def loss(found: Evidence, expected: Evidence, bounds: Bounds) -> str:
    """Compare losses."""
    precision = bounds.twin.precision
    allowed = EXACT if bounds.is_exact else max(LEAST_LOSS, 4 * bounds.roundoff)
    if precision.float8:
        allowed = precision.relative_tolerance()
    apart = found.loss_apart(expected)
    if apart <= allowed:  # a NaN is not
        return ""
    return (
        f"loss {found.loss:.5f} differs from the reference's {expected.loss:.5f} by {apart:.2g}, where "
        f"rounding explains {allowed:g} at most,"
    )


def beyond_half(tensor: Tensor) -> float:
    """Share of the numbers with more than 11 binary digits (bfloat16: 8); 0 of few, by chance less."""
    if tensor.numel() < FEW_NUMBERS:
        return 0.0
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return float((numbers.float().view(torch.int32) & 0x1FFF != 0).double().mean())


def digits_lost(found: Named, wanted: Named) -> str:
    """Say which of these has the digits of half precision in all numbers, and not in `wanted`."""
    for name, tensor in wanted.items():
        is_half = name in found and not beyond_half(found[name])
        if is_half and beyond_half(tensor) > MOST_NUMBERS:
            return (
                f"gradient of `{name}` has the digits of half precision in all of its numbers, where the "
                "reference's has those of float32,"
            )
    return ""


def longer(found: Named, wanted: Named, norms: dict[str, float]) -> dict[str, float]:
    """By what share each gradient that does not nearly vanish is longer in its own direction."""
    least = LEAST * typical_norm(norms)
    large = {n: wanted[n] for n, norm in norms.items() if norm > least and n in found}
    apart = minus(found, large)
    if not large:
        return {}
    shares = [(apart[n] * wide(g).conj()).sum().real / norms[n] ** 2 for n, g in large.items()]
    return dict(zip(large, torch.stack(shares).tolist(), strict=True))


class Gradients:
    """Gradients, tensor by tensor, by the noise that rounding leaves in each.

    Args:
        bit_for_bit: whether they may be, or in float64 were, the reference model's to the last bit.

    Attributes:
        bit_for_bit: the same after the steps so far.
    """

    def __init__(self, bit_for_bit: bool) -> None:
        self.bit_for_bit = bit_for_bit
        self._noise: dict[str, float] = {}
        self._longer: dict[str, list[float]] = {}
        self._shorter: dict[str, float] = {}
        self._shares: list[float] = []

    def __call__(self, found: Evidence, expected: Evidence, bounds: Bounds) -> str:
        """Compare those of a step; of float32 the digits, too, where the reference's are not rounded."""
        these, wanted = found.gradients, expected.gradients
        norms, apart = norms_of(wanted), norms_of(minus(these, wanted))
        typical = typical_norm(norms)
        if expected.noise:
            self._noise = {n: size / (typical or 1.0) for n, size in expected.noise.items()}
        allowed = bounds.gradients(wanted, self._noise)
        if bounds.is_exact:
            self.bit_for_bit &= not any(apart.values())
        else:
            for name, share in longer(these, wanted, norms).items():
                if allowed[name] >= norms[name]:  # rounding may leave nothing of its length
                    continue
                self._longer.setdefault(name, []).append(share)
                # whose errors are large: their squares count
                if bounds.twin.objective.couples_images:
                    self._shorter[name] = (self._noise[name] * typical / norms[name]) ** 2
            self._shares += [apart[n] / (allowed[n] or 1.0) for n in norms]
        told = furthest("gradient", apart, allowed, norms)
        if told or bounds.sent or bounds.stored != torch.float32:
            return told
        return digits_lost(these, wanted)

    def lengths(self, found: Evidence, expected: Evidence, bounds: Bounds) -> str:
        """Compare lengths over all steps: signs of rounding errors differ from step to step."""
        if not self._longer:
            return ""
        apart = typical_norm({n: sum(s) / len(s) for n, s in self._longer.items()})
        rounding = max(LEAST_LOSS, bounds.own_rounding / 2)
        squares = typical_norm(self._shorter) if self._shorter else 0.0
        allowed = rounding * (1 + FEW_TENSORS / len(self._longer)) + squares
        if apart <= allowed:
            return ""
        return (
            f"gradients are longer or shorter than the reference's by {apart:.3g} (root mean square over "
            f"tensors), where rounding explains {allowed:.3g} at most,"
        )

    def orders(self, found: Evidence, expected: Evidence, bounds: Bounds) -> str:
        """Compare all with rounding where the twin computes in the reference model's order.

        It does where the float64 of a CPU was the same bit for bit; a GPU may have kernels of another order
        in half precision, a compiler keeps more digits between operations, shards of masters are given more
        digits by their exchange, and float8 has few.
        """
        twin = bounds.twin
        widened = twin.sharding.shards_parameters and bounds.plan.master_weights
        few_digits = twin.precision.float8 or bounds.sent
        rounds_apart = any(choice.rounds_apart for choice in twin.techniques.values())
        other_order = bounds.world.device.type != "cpu" or rounds_apart
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


def buffers(found: Evidence, expected: Evidence, bounds: Bounds) -> str:
    """Compare buffers of the first replica; other replicas may be given its own."""
    if bounds.world.data_parallel_rank:
        return ""
    there = {n: b for n, b in expected.buffers.items() if n in found.buffers}
    allowed = EXACT if bounds.is_exact else 8 * bounds.roundoff
    return bounds.apart("buffer", found.buffers, there, allowed)


class Updates:
    """Updates, with what the optimizer's definition makes of the same gradients.

    Args:
        bounds: of the twin.
        reference: its model names the weights that are trained.
    """

    def __init__(self, bounds: Bounds, reference: Reference) -> None:
        choice, stored, model = bounds.twin.optimizer, bounds.stored, reference.plain.model
        self._trained = {plain_name(n) for n, p in model.named_parameters() if p.requires_grad}
        self._definitions = definitions_of(choice, stored, names_in_blocks(model))
        rounds = stored in HALF and is_elementwise(choice)
        self._unrounded = ByEquations(choice, torch.float64) if rounds else None
        self._squares = [0.0, 0.0]

    def __call__(self, found: Evidence, expected: Evidence, bounds: Bounds) -> str:
        """Compare those of a step, each tensor with the nearest definition."""
        before, moved = found.before, minus(found.weights, found.before)
        used = {n: g for n, g in found.gradients.items() if n in self._trained}
        made = [minus({**before, **each(before, used)}, before) for each in self._definitions]
        wanted = {n: min((m[n] for m in made), key=lambda m: (moved[n] - m).norm()) for n in before}
        if self._unrounded:
            ideal = minus({**before, **self._unrounded(before, used)}, before)
            for kind, tensors in enumerate((minus(moved, ideal), ideal)):
                self._squares[kind] += sum(norm * norm for norm in norms_of(tensors).values())
        return bounds.apart("update", moved, wanted, bounds.update(wanted, found.weights))

    def told(self) -> list[str]:
        """Say how far all updates are from those without rounding, where weights are stored in half."""
        apart, size = self._squares
        return [f"updates {(apart / size) ** 0.5:.2g} of their norm from float32's"] if size else []


def weights(what: str, found: Evidence, expected: Evidence, bounds: Bounds) -> str:
    """Compare weights that forward passes read: equal but for one rounding to their dtype."""
    dtype = getattr(torch, bounds.plan.param_dtype)
    allowed = 1.01 * ROUNDOFF[dtype] if dtype in HALF else 0.0
    return bounds.apart(what, found.read, expected.read, allowed)


def half(reference: Reference, found: Evidence, expected: Evidence, bounds: Bounds) -> str:
    """Compare a module of the user's in half precision with itself in float32, both without techniques.

    It may compute something else under autocast, or where it is cast; the reference model does so then.
    """
    twin, plan = bounds.twin, bounds.plan
    in_half = plan.autocast_dtype or (plan.param_dtype if plan.master_weights else None)
    if not isinstance(twin.model, ModuleSpec) or in_half is None:
        return ""
    exact_cell = replace(twin, precision=exact_twin(twin).precision)
    unrounded = PlainModel(exact_cell, bounds.world.device, reference.in_parts)
    at = found.read, found.buffers, global_batch(twin, 0, bounds.world)
    exact, rounded = unrounded.step(*at, 0).gradients, reference.step(*at, found)
    typical = bounds.own_rounding * typical_norm(norms_of(exact))
    allowed = {n: HALF_TIMES * rounded.noise[n] + typical for n in exact}
    return bounds.apart("reference gradient in half", rounded.gradients, exact, allowed)
