"""Proof of equality: a tiny twin of a cell, trained with its techniques, must match reference training.

The twin gives what is found, the reference model what is expected (`evidence`). Lists of `checks` compare
them, before the first step, in each step and over all steps; the first fault of any rank ends the proof.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from vitsweep.collectives.primitives import gathered
from vitsweep.errors import VitsweepError
from vitsweep.model.module_look import as_it_was
from vitsweep.proof import checks, faults
from vitsweep.proof.evidence import Evidence, Reference, TrainedTwin
from vitsweep.proof.faults import Place, WrongResultError, agree, wrong_result
from vitsweep.proof.optimizer_definitions import series_apart
from vitsweep.proof.reference import plain_model
from vitsweep.proof.twin import (
    STEPS,
    Parts,
    exact_twin,
    global_batch,
    not_proved,
    parts_of,
    twin_of,
    without,
)
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import Check
from vitsweep.world import World, device_mesh

MOST_TRIALS = 4
"""Most proofs that follow a wrong one, each with one suspect replaced by the plain choice."""
BIT_FOR_BIT = "bit for bit in float64"
Checks = Sequence[tuple[Place, Check]]
"""The place to blame for what a check finds, and the check."""
Shown = tuple[float, list[str]]
"""Largest relative difference of a loss, and what a record says."""
MANY_NUMBERS = (256, 257)
"""Shape of a matrix of more than 2**16 numbers, as many as multi-tensor kernels take at a time."""


@as_it_was()
def proof_of(cell: CellSpec, world: World, earlier: str = "") -> str:
    """Prove a cell (see `prove`), and return what its record says of that.

    Args:
        cell: the cell.
        world: its ranks; every rank calls this function.
        earlier: what this function returned for a cell that differs in its precision alone, and whose
            comparison in float64 serves this one too; "" where there is none.
    """
    _, told = _proved(cell, world, not earlier, BIT_FOR_BIT in earlier)
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
    - buffers, and what the cell's choices add (`Technique.checks`).

    The optimizer is proved once more alone, see `proof.optimizer_definitions.series_apart`.

    Args:
        cell: the cell.
        world: its ranks; every rank calls this function.
        exactly: False where a cell that differs in its precision alone was proved in float64.

    Returns:
        The largest relative difference of a loss in the cell's precision.

    Raises:
        WrongResultError: something differs by more than rounding explains.
        VitsweepError: all gradients are zero.
    """
    return _proved(cell, world, exactly)[0]


def _proved(cell: CellSpec, world: World, exactly: bool, bit_for_bit: bool = False) -> Shown:
    """Run the twins; return what the one in the cell's precision shows, or narrow down what is at fault."""
    begun, twin = time.monotonic(), twin_of(cell)
    try:
        if exactly:
            _prove_optimizer(twin, world)
        return _legs(twin, world, exactly, bit_for_bit)
    except WrongResultError as error:
        wrong = error.with_traceback(None)  # whose frames hold the models
    raise _narrowed(wrong, world, begun)


def _legs(twin: CellSpec, world: World, exactly: bool, bit_for_bit: bool = False) -> Shown:
    """Run a twin in float64, where asked for, and in its own precision; return what the last one shows."""
    parts = parts_of(exact_twin(twin), world)
    if exactly:
        exact = _leg(exact_twin(twin), world, parts)
        if exact_twin(twin) == twin:
            return exact
        bit_for_bit = BIT_FOR_BIT in exact[1]
    return _leg(twin, world, parts.rounded, bit_for_bit)


def _leg(twin: CellSpec, world: World, parts: Parts, bit_for_bit: bool = False) -> Shown:
    """Train a twin beside the reference model in its precision, and run all checks."""
    bounds = checks.Bounds(twin, world)
    trained, reference = TrainedTwin(twin, world), Reference(twin, world, parts.are_computed)
    gradients = checks.Gradients(bit_for_bit or bounds.is_exact)
    updates = checks.Updates(bounds, reference)
    before_the_first_step: Checks = [
        (faults.START, checks.buffers),
        (faults.START, partial(checks.weights, "first weight")),
        (faults.MODULE, partial(checks.half, reference)),  # moves its running statistics
    ]
    in_each_step: Checks = [
        (faults.FORWARD, checks.loss),
        (faults.BACKWARD if bounds.is_exact else faults.EITHER, gradients),
        (faults.EITHER, checks.buffers),
        (faults.UPDATE, updates),
        (faults.UPDATE, partial(checks.weights, "weight that the model reads")),
        *((faults.UPDATE, own) for choice in twin.techniques.values() for own in choice.checks()),
    ]
    over_all: Checks = [(faults.EITHER, gradients.lengths), (faults.EITHER, gradients.orders)]

    def run(moment: Checks, found: Evidence, expected: Evidence, when: str) -> None:
        agree([(place, check(found, expected, bounds)) for place, check in moment], when, twin)

    found, worst, moves = trained.now(), 0.0, False
    run(before_the_first_step, found, reference.first(), "before the first step")
    for step in range(STEPS):
        batch, at = global_batch(twin, step, world), (found.read, found.buffers)
        found = trained.step(batch, step, found.weights)
        expected = reference.step(*at, batch, found)
        expected.read = found.weights
        worst = max(worst, found.loss_apart(expected))
        moves |= any(faults.norms_of(expected.gradients).values())
        run(in_each_step, found, expected, f"in step {step + 1}")
    run(over_all, found, expected, f"over {STEPS} steps")
    if not moves:
        raise VitsweepError(
            f"The nano twin of `model={twin.model.name}` has only zero gradients in {STEPS} steps, and "
            "none can be compared: mend the model or its loss, or use `measurement.prove=none`."
        )
    told = [f"twin {worst:.1e}", *[BIT_FOR_BIT] * gradients.bit_for_bit, *updates.told()]
    return worst, [*told, *parts.told]


def _narrowed(wrong: WrongResultError, world: World, begun: float) -> WrongResultError:
    """Name the choice without which the twin agrees, of several that may be at fault.

    Each in turn is replaced by its plain choice: first what changes little for the others, then what shares
    ranks in another way or changes the model, and the precision last, since the plain one rounds the least.
    Where the twin still differs without all that can be replaced, the others are named.

    Args:
        wrong: on all ranks.
        world: its ranks; every rank calls this function.
        begun: when the proof did; a further one begins only where `measurement.timeout_min` leaves twice the
            time of the longest so far.
    """
    suspects, twin = wrong.suspects, wrong.twin
    choices = {knob: getattr(twin, knob.partition(".")[0]) for knob in suspects}

    def order(knob: str) -> tuple[bool, bool, bool, int]:
        choice = choices[knob]
        is_last = knob == "precision"
        return is_last, choice.part_of_training, choice.changes_model, len(choice.axes)

    in_turn = sorted(choices, key=order)
    plain = [knob for knob in in_turn if without(twin, [knob])]
    others = {knob: typed for knob, typed in suspects.items() if knob not in plain}
    trials = [[knob] for knob in plain] if len(suspects) > 1 else []
    if others and len(plain) > 1:
        trials.append(plain)
    longest, last = time.monotonic() - begun, begun
    for knobs in trials[:MOST_TRIALS]:
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
        left = 60 * twin.measurement.timeout_min - (last - begun)
        if not gathered(left > 2 * longest)[0] or not (trial := without(twin, knobs)):
            return wrong
        is_equal = _is_equal(trial, world)
        if is_equal and len(knobs) == 1:
            named = {knobs[0]: suspects[knobs[0]]}
            return wrong_result(wrong.found, twin, named, is_sure=True)
        if not is_equal and len(knobs) == len(plain) and others:
            return wrong_result(wrong.found, twin, others)
    return wrong


def _is_equal(twin: CellSpec, world: World) -> bool:
    if twin.compilation.scope != "nothing":
        torch.compiler.reset()  # compiles a function some times, then leaves it as it is
    if twin.mesh != world.shape:
        mesh = world.mesh and device_mesh(world.device.type, twin.mesh)
        world = replace(world, shape=twin.mesh, mesh=mesh)
    try:
        _legs(twin, world, exactly=True)
    except Exception:  # whatever a combination raises that nobody asked for
        return False
    return True


def _prove_optimizer(twin: CellSpec, world: World) -> None:
    """Refuse an optimizer whose weights or state leave its equations in a long series of updates."""
    choice = twin.optimizer
    # optimizers may treat blocks separately
    many = nn.ModuleDict({"blocks": nn.Sequential(nn.Linear(*MANY_NUMBERS))}).to(world.device)
    fault = series_apart(plain_model(twin, world.device), choice) or series_apart(many, choice, 4)
    agree([(faults.ALONE, fault)], "alone", twin)
