"""A sweep whose cells fail alike ends after one more cell; runs are simulated."""

from collections.abc import Callable, Sequence

import pytest

from tests.builders import of_present_code, run
from tests.cells import LAPTOP, TINY, composer
from vitsweep.composition.grid import expand
from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.planning.alike_failures import AlikeFailures
from vitsweep.planning.freeze import plan_of
from vitsweep.planning.rounds import blocks_in_turn, grid
from vitsweep.results.record import LOOK, RunRecord, Status

CODE = {"packages": {"torch": "2.13.0"}}
CELLS = ("optimizer=adamw_loop,adamw_foreach,adamw_fused", "memory=keep_all,recompute_blocks")
FAILED = (Status.failed, "ValueError: of\nFileNotFoundError: no file 17")
End = tuple[Status, str]


def command(
    ends: Callable[[int, dict[str, str]], End],
    *typed: str,
    earlier: Sequence[RunRecord] = (),
) -> tuple[AlikeFailures, list[RunRecord], list[dict[str, str]]]:
    """Run a command; `ends` tells how its next run ends, from its number and the choices of its cell."""
    cells = expand([*TINY, *CELLS, *(typed or ("measurement=smoke",))], composer())
    settings, plan = sweep_settings(cells[0].tree), plan_of(cells, LAPTOP, composer())
    records: list[RunRecord] = []
    rounds = grid(plan, settings, earlier, CODE)
    not_repeated = rounds.state(()).not_measured
    alike = AlikeFailures(plan, records, not_repeated, doubts=not earlier or bool(not_repeated))
    skipped, chosen = set(not_repeated), []
    for block in alike.ending(blocks_in_turn(rounds, records)):
        for entry in block.entries:
            if entry.cell_id in skipped or alike.passes_over(entry):
                continue
            chosen.append(dict(entry.composed.choices))
            status, reason = ends(len(records), chosen[-1])
            facts = {"environment": {"purpose": LOOK}} if block.is_look else {}
            made = run(entry.cell_id, block.name, status=status, reason=reason, **facts)
            records += of_present_code(plan, [made])
            skipped |= {entry.cell_id} if status not in (Status.measured, Status.killed) else set()
    return alike, records, chosen


def test_where_all_fail_alike_the_least_alike_cell_is_the_last() -> None:
    def ends(number: int, choices: dict[str, str]) -> End:
        return Status.failed, f"ValueError: of\nFileNotFoundError: no file {number}"

    alike, records, chosen = command(
        ends, "measurement=standard"
    )  # which looks at the baseline first
    assert len({run.cell_id for run in records}) == len(records) == 4
    assert alike.said.startswith("4 cells failed alike: FileNotFoundError: no file 3. ")
    assert "the others (2) were not started" in alike.said
    before = [set(choices.items()) for choices in chosen[:3]]
    left = [
        {"optimizer": o, "memory": m}
        for o in ("adamw_loop", "adamw_foreach", "adamw_fused")
        for m in ("keep_all", "recompute_blocks")
    ]
    shared = {
        tuple(cell.values()): sum(len(cell.items() & one) for one in before)
        for cell in left
        if not any(cell.items() <= one for one in before)
    }
    last = (chosen[3]["optimizer"], chosen[3]["memory"])
    assert shared[last] == min(shared.values())


def test_a_block_ends_once_the_baseline_and_two_others_have_failed() -> None:
    for _ in range(6):  # the order of a block is random
        alike, records, _ = command(lambda number, choices: FAILED)
        plain = [e.cell_id for e in alike.plan.entries.values() if e.baseline_id == e.cell_id]
        place = [run.cell_id for run in records].index(plain[0]) + 1
        assert len(records) == min(max(place, 3) + 1, 6)
        assert bool(alike.said) == (len(records) < 6)


@pytest.mark.parametrize(
    "ends",
    [
        lambda number, choices: (Status.out_of_memory, "out of memory"),
        lambda number, choices: (Status.timed_out, "took too long"),
        lambda number, choices: (Status.failed, f"KeyError: {choices['optimizer']}"),
        lambda number, choices: FAILED if number else (Status.measured, ""),
        lambda number, choices: FAILED if choices["optimizer"] != "adamw_loop" else (Status.diverged, "inf"),
        lambda number, choices: FAILED if number != 3 else (Status.out_of_memory, "out of memory"),
        lambda number, choices: FAILED if number != 3 else (Status.measured, ""),
    ],
    ids=["memory", "time", "other lines", "measured", "other baseline", "last of memory", "last well"],
)  # fmt: skip
def test_any_other_end_lets_all_cells_run(ends: Callable[[int, dict[str, str]], End]) -> None:
    alike, records, _ = command(ends)
    assert len({run.cell_id for run in records}) == 6
    assert not alike.said


def test_the_same_command_tries_one_more_cell_and_after_the_mend_all() -> None:
    _, earlier, _ = command(lambda number, choices: FAILED, "measurement=standard")
    again = {"earlier": earlier}
    alike, records, _ = command(lambda number, choices: FAILED, "measurement=standard", **again)
    assert (len(records), alike.said[:21]) == (1, "5 cells failed alike:")
    alike, records, _ = command(lambda *_: (Status.measured, ""), "measurement=standard", **again)
    assert not alike.said
    assert len({run.cell_id for run in [*earlier, *records]}) == 6
