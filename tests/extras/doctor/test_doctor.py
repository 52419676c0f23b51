"""What `vitsweep doctor` says of this machine."""

import json

import pytest

from vitsweep.cli import SCHEMA
from vitsweep.cli.main import run


@pytest.mark.smoke
def test_what_a_script_reads_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert {*tree} == {"schema", "machine", "software", "cluster", "problems"}
    assert tree["schema"] == SCHEMA
    assert "cores usable" in tree["machine"]["processor"]
    assert tree["software"]["torch"]


def test_what_is_mistyped_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--all"]) == 2
    assert "--all" in capsys.readouterr().err
