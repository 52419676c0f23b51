"""How long compiling took, in the first run of a cell and in later ones."""

from tests.builders import run, table
from tests.tables.test_render import printed
from vitsweep.tables.cells import cells
from vitsweep.tables.render import CellTable
from vitsweep.tables.sentences import say


def test_compiling_is_reported_of_the_first_run_and_of_those_that_find_its_kernels() -> None:
    took = {"blocks": (24.0, 2.0, 3.0), "eager": (0.0, 0.0, 0.0), "one": (9.0,)}
    runs = table(
        *(
            run(cell, f"b{n}", 100.0, minute=n, compilation=cell, metrics={"compile_seconds": s})
            for cell, every in took.items()
            for n, s in reversed(list(enumerate(every)))
        )
    )
    found = cells(runs, dict.fromkeys(took)).set_index("cell_id")
    assert found["first_compile_seconds"].to_dict() == {"blocks": 24, "eager": 0, "one": 9}
    assert found["compile_seconds"].to_dict() == {"blocks": 2.5, "eager": 0, "one": 9}
    told = printed(CellTable(found.reset_index(), "s"), 200)
    assert say("compiled", first="24.0", later=", later 2.50 s") in told
    assert say("compiled", first="9.00", later="") in told
