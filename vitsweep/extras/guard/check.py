"""`vitsweep.check`: what a training in progress computes now, beside the plain model at today's weights."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist

from vitsweep.collectives.primitives import gathered
from vitsweep.errors import VitsweepError
from vitsweep.extras.guard.arguments import require
from vitsweep.extras.guard.plain import Plain, PlainPasses, require_memory
from vitsweep.extras.take_home.apply import Applied
from vitsweep.model.module_look import as_it_was, differentiable, listed
from vitsweep.objectives.base import as_entries, as_given, at_least_float32
from vitsweep.objectives.cross_entropy import number_of_images
from vitsweep.proof.checks import HALF_TIMES, LEAST_LOSS, NOISE_TIMES, TINY, Bounds
from vitsweep.proof.faults import minus, norms_of, typical_norm, wide
from vitsweep.proof.reference import ROUNDOFF
from vitsweep.training.shards import Named, whole_tensors
from vitsweep.training.trainer import Trainer

LOSS, IN_FLOAT32 = "loss", "float32: "
"""A name of `distances`, and how those begin of a model in half precision beside itself in float32."""
PHASES = {
    "forward": "the forward pass",
    "backward or exchange": "the backward pass or the exchange of gradients, where outputs agree",
    "exchange": "the exchange of gradients, where outputs agree",
    "precision": "the model itself, which computes something else in half precision than in float32",
}
"""Phase of a fault -> what the sentence says."""
LEAST_LOSS_ROUNDING = 16 * ROUNDOFF[torch.float32]
"""Of a loss near zero: log(1 + x) has no more digits than 1."""
ENOUGH, SLICES = 0.5, 4
"""Half precision that is further from float32 is compared again, in so many slices of the batch at most."""
OF_ONE_RANK = 0.1
"""A difference is one rank's gradient where so much of it is left without a multiple of that."""
Verdict = Literal["sound", "wrong", "not judged"]


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What a check found; the same on every rank.

    The update and what a forward pass writes into buffers are not checked.

    Attributes:
        step: optimizer steps that were taken before.
        verdict: `not judged` where gradients overflow, those at the loss scale or the plain model's own, or
            where all are zero.
        sentence: what was found.
        worst: name of the tensor whose gradient is furthest off, or `loss`.
        distance: of that, in parts of what rounding explains; a fault is above 1.
        distances: kind of tensor (`blocks.*.mlp.up.weight`) -> the largest of its tensors.
        phase: of a fault: `forward`, `backward or exchange`, `exchange` or `precision`.
        rank: whose gradients do not count once, where the difference is of one rank.
        is_repeatable: whether the same pass gave the same loss and gradients twice, bit for bit.
        plain_s: seconds of each pass of the plain model, which waits for no rank, by rank.
        without_gradient: weights whose gradient vanishes.
        unmoved: of a `Guard`: weights of which no number has moved since its last check.
        slow_ranks: of a `Guard`: ranks whose `plain_s` are long beside those of the others.
    """

    step: int
    verdict: Verdict
    sentence: str
    worst: str
    distance: float
    distances: Mapping[str, float]
    phase: str
    rank: int | None
    is_repeatable: bool
    plain_s: tuple[tuple[float, ...], ...]
    without_gradient: tuple[str, ...]
    unmoved: tuple[str, ...] = ()
    slow_ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        said = self.sentence
        if self.unmoved:
            said += f" No number of {listed(self.unmoved)} has moved since the last check."
        for rank in self.slow_ranks:
            times = f"{slowness(self.plain_s)[rank]:.2g}"
            said += f" Rank {rank} is {times} times as slow as the others, where it waits for none."
        return said

    def as_line(self) -> dict[str, Any]:
        """Return plain values for a line of JSON."""
        finite = {n: d if math.isfinite(d) else None for n, d in self.distances.items()}
        distance = self.distance if math.isfinite(self.distance) else None
        found = {"distance": distance, "distances": finite, "not_checked": ["update", "buffers"]}
        return asdict(self) | found


def slowness(seconds: Sequence[Sequence[float]]) -> list[float]:
    """Return how many times as long as the median of all others each rank takes, in its median pass."""
    ranks = range(len(seconds) if len(seconds) > 1 else 0)
    passes = [*zip(*seconds, strict=True)]
    return [median(t[r] / median([*t[:r], *t[r + 1 :]]) for t in passes) for r in ranks]


class FaultFoundError(VitsweepError):
    """A training computes something else than its plain model.

    Attributes:
        result: of the check.
    """

    result: CheckResult


class _Running:
    now = False


def is_checking() -> bool:
    """Tell whether `vitsweep.check` runs the model now: hooks and counters of yours may leave that out."""
    return _Running.now


def check(training: Applied, batch: Any, *, raise_on_fault: bool = False) -> CheckResult:
    """Compare what a training computes with the plain model, at today's weights; every rank calls it.

    The first micro-batch runs once with all techniques, and on each rank without any. Loss and gradients may
    differ by what rounding explains, which is measured: the plain model runs again while each result of an
    operation moves to a neighbouring number (`proof.reference.RoundingNoise`). In half precision the plain
    model is compared with itself in float32, too.

    Weights, buffers, optimizer, loss scale, generators, modes and flags are as before afterwards, bit for
    bit. What hooks of yours do and what a module keeps outside of tensors is yours: see `is_checking`.

    Args:
        training: after its first step.
        batch: of this rank, as `step` takes it.
        raise_on_fault: raise where the verdict is `wrong`, on all ranks.

    Raises:
        BadValueError: `training` or `raise_on_fault` is of another kind.
        VitsweepError: the training took no step yet, has techniques that cannot be checked or a model that
            cannot be copied, or the memory is too small; on all ranks.
        FaultFoundError: see `raise_on_fault`.
    """
    require(training=training, raise_on_fault=raise_on_fault)
    if not training.has_begun:
        raise VitsweepError(
            "`vitsweep.check` compares a training in progress, and this one took no step: call `step` first."
        )
    refuse_unchecked(training)
    micro_batch = as_entries(training.micro_batches(batch, "check")[0])
    _Running.now = True
    try:
        with as_it_was(training.model), _draws_kept(training.trainer):
            require_memory(training, micro_batch)
            result = _checked(training, micro_batch)
    finally:
        _Running.now = False
    if raise_on_fault:
        raise_fault(result)
    return result


def raise_fault(result: CheckResult) -> None:
    """Raise what a check found.

    Raises:
        FaultFoundError: its verdict is `wrong`.
    """
    if result.verdict == "wrong":
        error = FaultFoundError(result.sentence)
        error.result = result
        raise error


def refuse_unchecked(training: Applied) -> None:
    """Refuse a training that `check` cannot compare with its plain model.

    Raises:
        VitsweepError: it has techniques that cannot be checked, or a model that cannot be copied.
    """
    cell = training.cell
    if training.bare is None and cell.model.draws_by_itself:
        raise VitsweepError(
            f"`vitsweep.check` needs a copy of the {cell.model.name} as it was before `vitsweep.apply`, and "
            "it could not be copied (a warning said why): let `copy.deepcopy` of it work."
        )
    typed = [f"`precision={cell.precision.name}`"] if cell.precision.float8 else []
    if cell.mesh.data_parallel_size != training.world.size:
        shared = {g: t for g, t in cell.techniques.items() if g.endswith("_parallel") and t.axes}
        typed += [f"`{group}={choice.name}`" for group, choice in shared.items()]
    if typed:
        raise VitsweepError(
            f"`vitsweep.check` does not check {' and '.join(typed)}: use it with `sharding` alone, in "
            "float32 or half precision. `measurement.prove=twin` of a sweep proves the rest."
        )


@contextmanager
def _draws_kept(trainer: Trainer) -> Iterator[None]:
    """Context after which random choices count their forward passes as before."""
    held = [vars(trainer.draws), *map(vars, trainer.model.modules())]
    counts = [{k: v for k, v in own.items() if _counts(k)} for own in held]
    try:
        yield
    finally:
        for own, before in zip(held, counts, strict=True):
            for key in [key for key in own if _counts(key)]:
                del own[key]
            own.update(before)


def _counts(name: str) -> bool:
    return name in ("replica", "step", "_begun") or name.startswith("drawn_")


@dataclass(frozen=True, kw_only=True)
class _Fast:
    loss: float
    gradients: Named
    outputs: Any


def _fast(trainer: Trainer, batch: Any) -> _Fast:
    """Run the training's own pass: its loss over all ranks, gradients whole and unscaled, own outputs."""
    seen: list[Any] = []
    hook = trainer.model.register_forward_hook(lambda module, given, outputs: seen.append(outputs))
    try:
        with as_it_was(trainer.model), trainer.own_random_numbers():
            loss = trainer.gradients(iter([batch]), micro_batches=1)
            if trainer.masters:
                trainer.masters.take_gradients()
            scale = trainer.scaler.current if trainer.scaler else 1.0
            found = whole_tensors(trainer, trainer.gradient_of)
            gradients = {n: at_least_float32(g) / scale for n, g in found.items()}
    finally:
        hook.remove()
        trainer.drop_gradients()
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= trainer.world.size
    return _Fast(loss=float(loss), gradients=gradients, outputs=seen[-1])


def _checked(training: Applied, batch: Any) -> CheckResult:
    trainer, size = training.trainer, training.world.size
    trainer.reshard()
    fast, again = _fast(trainer, batch), _fast(trainer, batch)
    pairs = [(torch.tensor(fast.loss), torch.tensor(again.loss))]
    pairs += [(gradient, again.gradients[name]) for name, gradient in fast.gradients.items()]
    same = all(torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True) for a, b in pairs)
    del again, pairs
    plain, bounds = PlainPasses(training, batch).run(), Bounds(training.cell, training.world)
    shares = _shares(fast, plain, bounds) | _confirmed(training, batch, plain, bounds)
    worst = max(shares, key=lambda name: shares[name])
    apart, outputs = minus(fast.gradients, plain.gradients), _share_of_outputs(fast, plain, bounds)
    own = [shares[worst], worst, outputs, _multiple(apart, plain.parts, size), same]
    ranks = gathered([*own, _why_not_judged(trainer, fast, plain), plain.seconds])
    distance, worst = max(found[:2] for found in ranks)
    of_outputs, multiples, repeated, reasons, seconds = zip(*(r[2:] for r in ranks), strict=True)
    nearest = min(range(size), key=lambda number: multiples[number][0])
    is_one = size > 1 and multiples[nearest][0] < OF_ONE_RANK
    kinds, norms = dict[str, float](), norms_of(plain.gradients)
    reason, phase, rank = next(filter(None, reasons), ""), "", None
    if not reason and distance <= 1 and not any(norms.values()):
        reason = "all gradients are zero, so that none can be compared"
    verdict: Verdict = "not judged" if reason else "wrong" if distance > 1 else "sound"
    if verdict == "wrong" and worst.startswith(IN_FLOAT32):
        phase = "precision"
    elif verdict == "wrong" and max(of_outputs) > 1:
        phase = "forward"
    elif verdict == "wrong":
        phase, rank = ("exchange", nearest) if is_one else ("backward or exchange", None)
    what, how_far = _named(worst, trainer.names), " bit for bit"
    if distance:
        how_far = f" ({what} is furthest off, by {distance:.2g} of what rounding explains)"
    said = {
        "not judged": f"not judged: {reason}.",
        "sound": f"loss and gradients are the plain model's{how_far}.",
        "wrong": f"{what} is {distance:.3g} times as far from the plain model's as rounding "
        f"explains. It shows first in {PHASES.get(phase, '')}.",
    }[verdict]
    if rank is not None:
        said += f" Gradients of rank {rank} count {multiples[rank][1]:.3g} times."
    if not all(repeated):
        said += " The same pass twice gave other numbers: this device is not deterministic here."
    vanished = [n for n, norm in norms.items() if norm <= TINY * typical_norm(norms)]
    for name, share in shares.items():
        kind = re.sub(r"\b\d+\b", "*", name)
        kinds[kind] = max(kinds.get(kind, 0.0), share)
    return CheckResult(
        step=trainer.steps_taken,
        verdict=verdict,
        sentence=f"Step {trainer.steps_taken}: {said}",
        worst=worst,
        distance=distance,
        distances=kinds,
        phase=phase,
        rank=rank,
        is_repeatable=all(repeated),
        plain_s=tuple(map(tuple, seconds)),
        without_gradient=tuple(vanished),
    )


def _named(worst: str, names: Mapping[str, str]) -> str:
    if worst == LOSS:
        return "the loss"
    name = worst.removeprefix(IN_FLOAT32)
    return f"the gradient of `{names.get(name, name)}`" + " in half precision" * (name != worst)


def _shares(fast: _Fast, plain: Plain, bounds: Bounds) -> dict[str, float]:
    """Return distances in parts of what rounding explains, by name."""
    norms, apart = norms_of(plain.gradients), norms_of(minus(fast.gradients, plain.gradients))
    typical = typical_norm(norms)
    noise = {n: size / (typical or 1.0) for n, size in plain.noise.items()}
    allowed = bounds.gradients(plain.gradients, noise)
    of_loss = NOISE_TIMES * plain.loss_noise + LEAST_LOSS * abs(plain.loss) + LEAST_LOSS_ROUNDING
    found = {LOSS: _share(abs(fast.loss - plain.loss), of_loss)}
    return found | {name: _share(distance, allowed[name]) for name, distance in apart.items()}


def _confirmed(training: Applied, batch: Any, plain: Plain, bounds: Bounds) -> dict[str, float]:
    """Return distances between half precision and float32; large ones as the least over slices of the batch.

    A number that rounding moves across a kink, as of ReLU, changes gradients by more than their noise, which
    may have moved none. It does so for an image or two, and what is wrong in half precision for all.
    """
    found = _shares_of_half(plain, bounds)
    doubt = max(found.values(), default=0.0) > ENOUGH
    ranks = gathered([doubt, number_of_images(batch)])
    slices = min(SLICES, *(rank[1] // 2 for rank in ranks))  # BatchNorm takes no single image
    if any(rank[0] for rank in ranks) and slices > 1:
        for part in map(as_entries, training.micro_batches(as_given(batch), "check", slices)):
            again = _shares_of_half(PlainPasses(training, part).run(), bounds)
            found = {name: min(share, again[name]) for name, share in found.items()}
    return found


def _shares_of_half(plain: Plain, bounds: Bounds) -> dict[str, float]:
    exact = plain.in_float32
    least = bounds.own_rounding * typical_norm(norms_of(exact)) if exact else 0.0
    apart = norms_of(minus(plain.gradients, exact))
    return {
        IN_FLOAT32 + n: _share(d, HALF_TIMES * plain.noise[n] + least) for n, d in apart.items()
    }


def _share(distance: float, allowed: float) -> float:
    if not distance:
        return 0.0
    share = distance / allowed if allowed else math.inf
    return math.inf if math.isnan(share) else share


def _share_of_outputs(fast: _Fast, plain: Plain, bounds: Bounds) -> float:
    """Return by how much this rank's outputs differ, in parts of what rounding explains."""
    shares = [0.0]
    for own, wanted, noise in zip(
        differentiable(fast.outputs), plain.outputs, plain.outputs_noise, strict=False
    ):
        allowed = NOISE_TIMES * noise + bounds.own_rounding * float(wide(wanted).norm())
        shares.append(_share(float((wide(own.detach()) - wide(wanted)).norm()), allowed))
    return max(shares)


def _multiple(apart: Named, own: Named, size: int) -> tuple[float, float]:
    """Return how much of a difference is no multiple of this rank's gradients, and how often they count."""
    along = sum(float((wide(g).conj() * apart[n]).sum().real) for n, g in own.items())
    square = sum(float(wide(g).abs().square().sum()) for g in own.values())
    whole = sum(norm * norm for norm in norms_of(apart).values())
    if not (square and whole and math.isfinite(along)):
        return 1.0, 1.0
    left = max(0.0, 1 - along * along / (square * whole))
    return left**0.5, 1 + size * along / square


def _why_not_judged(trainer: Trainer, fast: _Fast, plain: Plain) -> str:
    exact = [plain.loss, *norms_of(plain.gradients).values(), *plain.noise.values()]
    if not all(map(math.isfinite, exact)):
        return "the plain model's loss or gradients are not finite either"
    found = [fast.loss, *norms_of(fast.gradients).values()]
    if trainer.scaler and not all(map(math.isfinite, found)):
        return f"gradients overflow at a loss scale of {trainer.scaler.current:g}, whose step is skipped"
    return ""
