"""Run the notebooks on the samples and keep their outputs: `python -m analysis.keep_outputs`.

Needs `nbclient` and `ipykernel`, which the tests install. Run it after a change of the sample, of a
table or of a chart that a notebook shows.
"""

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent


def executed(path: Path) -> NotebookNode:
    """Return a notebook with its outputs, without times and the names of this machine's Python."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        timeout=300,
        resources={"metadata": {"path": str(path.parent)}},
        extra_arguments=["--log-level=ERROR"],
    ).execute()
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata = {}
    return notebook


def main() -> None:
    """Execute every notebook of this folder in place."""
    os.environ["PYTHONPATH"] = str(FOLDER.parent)
    os.environ.pop("SWEEP", None)
    for path in sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(executed(path), path)


if __name__ == "__main__":
    main()
