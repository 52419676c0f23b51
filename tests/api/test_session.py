"""The way of a cell from the command line to the folder of its sweep."""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest
from rich.console import Console

from tests.cells import TINY
from vitsweep.api.plan import overview
from vitsweep.api.session import open_session
from vitsweep.launchers.base import prepared
from vitsweep.planning.blocks import Noise, describe_detectable_effect


@pytest.mark.parametrize("wanted", ["precision=O1,O2 sharding=ddp,fsdp", "+sweep=first"])
def test_a_cell_is_composed_once_and_typed_once(wanted: str, tmp_path: Path) -> None:
    """Of five cells, one of which is the baseline that the others share."""
    calls: dict[str, Counter[str]] = {
        name: Counter() for name in ("_composed", "cell_from_tree", "_checked", "baseline_of")
    }

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (name := frame.f_code.co_name) in calls:
            values = frame.f_locals
            first = values["parsed"] if name == "_composed" else next(iter(values.values()))
            calls[name][repr(first)] += 1

    sys.setprofile(count)
    try:
        words = [*TINY, *wanted.split(), f"sweep.folder={tmp_path}"]
        session = open_session(words, Console(quiet=True))
        found = overview(session)
        rows = found.rows
        with prepared(session.request()) as sweep:
            assert len(sweep.plan.entries) == len(rows) == 5
            said = describe_detectable_effect(sweep.plan, Noise())
            assert said in found.detectable_effect
            assert said or "baseline=null" in wanted
    finally:
        sys.setprofile(None)
    assert {max(found.values()) for found in calls.values()} == {1}
    assert len(calls["cell_from_tree"]) == 5
    assert len(calls["_composed"]) == 5 + 3  # the nodes `sweep`, `machine` and the default one
