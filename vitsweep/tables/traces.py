"""Profiler traces of runs: their paths."""

from pathlib import Path

from vitsweep.results.store import Store


def traces_of(store: Store) -> dict[str, Path]:
    """Return cell -> its latest trace, for cells that were run with `measurement.trace=true`."""
    found = store.cells.glob("*/attempts/*/trace.json.gz")
    newest_last = sorted(found, key=lambda path: path.stat().st_mtime)
    return {path.parents[2].name: path for path in newest_last}
