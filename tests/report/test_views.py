"""Files that `collect` makes from the records."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.builders import run
from vitsweep.report.views import collect
from vitsweep.results.store import Store


def test_collect_rewrites_only_the_records_of_cells_that_changed(tmp_path: Path) -> None:
    store = Store(tmp_path / "sweep").create()
    for cell_id in ("aa", "bb"):
        store.save_run(run(cell_id))
    collect(store)
    before = {path: path.stat().st_ino for path in store.cells.glob("*/record.json")}
    assert len(before) == 2
    store.save_run(run("bb", block="b1"))
    collect(store)
    changed = {path.parent.name for path, inode in before.items() if path.stat().st_ino != inode}
    assert changed == {"bb"}


def test_several_commands_may_collect_one_sweep_at_once(tmp_path: Path) -> None:
    store = Store(tmp_path / "sweep").create()
    for cell in range(4):
        store.save_run(run(f"cell{cell}"))
    with ThreadPoolExecutor(4) as pool:
        tables = list(pool.map(lambda _: collect(Store(store.root)), range(16)))
    assert all(len(found.cells) == 4 for found in tables)
    assert not list(store.root.glob("**/.*.draft"))
