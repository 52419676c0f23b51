"""Files that `collect` makes from the records."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.builders import run
from vitsweep.report.views import collect
from vitsweep.results.store import Store


def test_several_commands_may_collect_one_sweep_at_once(tmp_path: Path) -> None:
    store = Store(tmp_path / "sweep").create()
    for cell in range(4):
        store.save_run(run(f"cell{cell}"))
    with ThreadPoolExecutor(4) as pool:
        tables = list(pool.map(lambda _: collect(Store(store.root)), range(16)))
    assert all(len(found.cells) == 4 for found in tables)
    assert not list(store.root.glob("**/.*.draft"))
