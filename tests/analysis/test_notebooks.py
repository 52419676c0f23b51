"""The notebooks run as they are, on the sample and on other sweeps."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import vitsweep
from tests import sample_sweep
from vitsweep.tables.names import names_by_id

ROOT = Path(__file__).parents[2]
NOTEBOOKS = {"speedups": "speedups", "scaling_curves": "scaling", "sequence_parallel": "sequences"}


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweeps")
    return {name: store.root for name, store in sample_sweep.write_all(folder).items()}


def executed(folders, monkeypatch):
    """Run notebooks on these folders in one kernel, each in an empty namespace; return name -> outputs."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    there = ROOT / "analysis"  # where Jupyter runs a notebook, wherever it was started
    joined, cells = nbformat.v4.new_notebook(), {}
    for name, folder in folders.items():
        start = f"%reset -f\nimport os\nos.environ['SWEEP'] = {str(folder)!r}\ndel os"
        cells[name] = nbformat.read(there / f"{name}.ipynb", as_version=4).cells
        joined.cells += [nbformat.v4.new_code_cell(start), *cells[name]]
    NotebookClient(joined, timeout=300, resources={"metadata": {"path": str(there)}}).execute()
    return {n: [o for cell in own for o in cell.get("outputs", [])] for n, own in cells.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the kernel's own libraries
def test_a_notebook_runs_and_draws(sweeps, monkeypatch):
    folders = {name: sweeps[sweep] for name, sweep in NOTEBOOKS.items()}
    for outputs in executed(folders, monkeypatch).values():
        assert not [o for o in outputs if o.output_type in ("error", "stream")]
        drawn = [o for o in outputs if "image/svg+xml" in o.get("data", {})]
        tables = [o for o in outputs if "text/html" in o.get("data", {})]
        assert len(drawn) >= 2
        assert len(tables) >= 3


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_on_the_sample(name, monkeypatch):
    assert executed({name: "analysis/sample"}, monkeypatch)[name]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_kept_with_its_outputs_and_no_trace_of_a_machine(name):
    path = ROOT / "analysis" / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    assert not [o for o in outputs if o.output_type in ("error", "stream")]
    assert len([o for o in outputs if "image/svg+xml" in o.get("data", {})]) >= 2
    assert len([o for o in outputs if "text/html" in o.get("data", {})]) >= 3
    text = path.read_text()
    assert ("NVIDIA H200" in text) == (name == "speedups")
    assert not [root for root in ("/home/", "/root/", "/tmp/", str(ROOT)) if root in text]
    assert len(text) < 1_500_000


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_no_cell_is_named_by_its_id(name):
    """Ids are hashes: a reader cannot tell what they stand for. Cells that look alike have them."""
    text = (ROOT / "analysis" / f"{name}.ipynb").read_text()
    samples = [ROOT / "analysis" / sample for sample in ("sample", "sample_h200")]
    names = {i: n for s in samples for i, n in names_by_id(vitsweep.load(s).cells).items()}
    told_apart = [cell_id for cell_id, cell in names.items() if cell_id not in cell]
    assert len(told_apart) > 20
    assert not [cell_id for cell_id in told_apart if cell_id in text]
