from vitsweep.tables.notes import reason_lines

CELLS = [
    {"precision": precision, "sharding": sharding, "ranks": "2"}
    for precision in ("O1", "O2")
    for sharding in ("ddp", "none")
]


def test_cells_of_one_reason_are_one_line_that_names_what_only_they_have():
    reasons = ["", "needs one rank", "", "needs one rank"]
    assert reason_lines(CELLS, reasons) == ["2 cells with `sharding=none`: needs one rank"]


def test_cells_without_a_setting_of_their_own_are_named_by_all_that_they_share():
    reasons = ["", "", "", "no room"]
    assert reason_lines(CELLS, reasons) == ["1 cell with `precision=O2 sharding=none`: no room"]


def test_when_all_cells_are_refused_nothing_distinguishes_them():
    assert reason_lines(CELLS, ["no GPU"] * 4) == ["4 cells: no GPU"]
    assert reason_lines([], []) == []
