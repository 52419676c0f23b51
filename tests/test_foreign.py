"""What somebody else wrote is read within bounds: small files that ask for much are refused by name."""

import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from vitsweep import foreign as foreign_module
from vitsweep.errors import VitsweepError
from vitsweep.foreign import (
    MOST_COLUMNS,
    OF_SWEEP,
    ForeignFileError,
    foreign,
    foreign_table,
    parsed_json,
    parsed_lines,
    parsed_yaml,
    size_of,
)

LAUGHS = "".join(f"l{i + 1}: &l{i + 1} [{', '.join([f'*l{i}'] * 9)}]\n" for i in range(12))
YAML = (
    (f"l0: &l0 [lol]\n{LAUGHS}", "anchor `l0`"),
    ("a: *nothing\n", "anchor `nothing`"),
    ("a: !!python/object/apply:os.system [id]\n", "tag `tag:yaml.org,2002:python/object"),
    ("a: !custom 1\n", "tag `!custom`"),
    ("[" * 300_000, "levels"),
    ("a: [" + "[]," * 300_000 + "]", "20001 values"),
    ("- " * 300_000, "levels"),
    ("{a: " * 200_000, "levels"),
    ("? " * 300_000, "levels"),
    ("a: 1" + ":59" * 300_000, "digits"),
    ("a: " + "b" * 2**20, "bytes"),
    (f"a: {2**63}", "int that no setting"),
    ("a: 2026-01-01", "date that no setting"),
    ("a: {b: ", "no YAML (ParserError)"),
    ("{[a]: 1}", "no YAML (ConstructorError)"),
)
"""Texts that hang, fill or end a reader of YAML, and the rule that each breaks."""


def test_yaml_that_asks_for_much_is_refused_by_its_rule(tmp_path: Path) -> None:
    path = tmp_path / "cell.yaml"
    for text, rule in YAML:
        path.write_text(text)
        with pytest.raises(VitsweepError) as refused:
            foreign(path)
        assert str(path) in str(refused.value)
        assert rule in str(refused.value)


def test_yaml_of_settings_is_read_as_it_was() -> None:
    text = "a: [1, -2.5, .inf, yes, null, 'text *&!', {b: 1e-6, 3: x}]\nc: '2026-01-01'\n"
    tree = parsed_yaml(text)
    assert tree["a"][:2] == [1, -2.5]
    assert tree["a"][3:] == [True, None, "text *&!", {"b": "1e-6", 3: "x"}]
    assert tree["c"] == "2026-01-01"
    assert parsed_yaml("") is None


def test_json_that_asks_for_much_is_refused_before_it_is_parsed() -> None:
    for text, rule in {
        f"[{','.join(['[]'] * 30_000)}]": "sections",
        str({f"k{i}": 1 for i in range(30_000)}).replace("'", '"'): "texts",
        f'"{"x" + chr(92) + "n" * 2}{(chr(92) + "u0000") * 30_000}"': "backslashes",
        "[" * 5_000 + "]" * 5_000: "nested",
        "9" * 5_000: "digits",
        "[1,": "Expecting",
    }.items():
        with pytest.raises(ValueError, match=rule):
            parsed_json(text)
    with pytest.raises(ValueError, match="sections"):
        parsed_lines(b"{}\n" * 1_500_000, OF_SWEEP)


def test_a_text_is_read_up_to_its_bound_and_not_beyond() -> None:
    levels, digits = foreign_module.MOST_LEVELS, foreign_module.MOST_DIGITS
    for good, bad, parsed in (
        ("[" * levels + "]" * levels, "[" * (levels + 1) + "]" * (levels + 1), parsed_yaml),
        ("9" * 18, "9" * (digits + 1), parsed_yaml),
        (str(2**63 - 1), str(2**63), parsed_yaml),
        (str(-(2**63)), str(-(2**63) - 1), parsed_yaml),
        ("a: " + "b" * (digits + 1), "a: " + "1" * (digits + 1), parsed_yaml),
        (
            "[" * (levels - 1) + "]" * (levels - 1),
            "[" * (levels + 2) + "]" * (levels + 2),
            parsed_json,
        ),
    ):
        parsed(good)
        with pytest.raises(ValueError, match=" "):
            parsed(bad)
    for text, number in (
        ("9" * 18, int("9" * 18)),
        (str(2**63 - 1), 2**63 - 1),
        (str(-(2**63) + 1), -(2**63) + 1),
        (str(2**63), float(2**63)),
        ("9" * 400, None),
        ("NaN", None),
        ("-Infinity", None),
    ):
        found = parsed_json(f"[{text}]")[0]
        assert found == number
        assert type(found) is type(number)
    assert parsed_json(r'"a\u001bb\u009fc\\u001b\n"') == "a?b?c\\u001b\n"


def test_the_size_of_a_section_is_that_of_all_that_it_holds() -> None:
    assert size_of({"a": "xy", "b": [1, "z", {"c": "four"}]}) == 2 + 2 + (3 + 1 + (1 + 4))


def test_a_json_of_many_steps_is_read() -> None:
    steps = [[0.125] * 10_000] * 64
    assert parsed_json(str(steps).replace(" ", "\n")) == steps


def written(path: Path, table: pa.Table, **options: object) -> Path:
    parquet.write_table(table, path, **options)
    return path


def test_a_parquet_file_is_judged_by_its_footer(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("vitsweep.foreign.MOST_TABLE_BYTES", 2**20)
    many = pa.chunked_array([pa.nulls(4_000_000)] * 10)
    for rule, table in (
        ("rows", pa.table({"cell_id": many})),
        ("values", pa.table({"cell_id": many[:20_000_000], "run_id": many[:20_000_000]})),
        ("columns", pa.table({f"c{i}": [1] for i in range(MOST_COLUMNS + 1)})),
        ("columns in columns", pa.table({"cell_id": [{"a": 1, "b": 2}]})),
        ("lists", pa.table({"cell_id": [[1] * 3]})),
        ("bytes", pa.table({"cell_id": ["a" * 2**20]})),
    ):
        path = written(tmp_path / "runs.parquet", table, compression="zstd")
        assert path.stat().st_size < 2**20
        with pytest.raises(ForeignFileError, match=rule) as refused:
            foreign_table(path)
        assert str(path) in str(refused.value)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(VitsweepError, match=re.escape(f"`{path}`")):
        foreign_table(path)
    with pytest.raises(FileNotFoundError):
        foreign_table(tmp_path / "nothing.parquet")


def test_a_text_that_stands_in_every_row_is_in_memory_once(tmp_path: Path) -> None:
    rows = 20_000
    text = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), ["a" * 200_000])
    table = pa.table({"cell_id": text, "run_id": [str(i) for i in range(rows)]})
    path = written(tmp_path / "runs.parquet", table, store_schema=False)
    code = (
        "import sys; from pathlib import Path; from vitsweep.foreign import foreign_table\n"
        "table = foreign_table(Path(sys.argv[1])); assert len(table) == 20_000\n"
        "assert table['cell_id'].dtype == object and table['run_id'][7] == '7'\n"
        "print(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0])"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert int(done.stdout) < 2**20, done.stderr


def test_a_table_of_vitsweep_is_read_as_pandas_reads_it(tmp_path: Path) -> None:
    for path in sorted(Path("analysis/sample").glob("*.parquet")):
        read, own = pd.read_parquet(path), foreign_table(path)
        for table in (read, own):  # one has None where the other has NA
            for column in table.columns[table.isna().any()]:
                table[column] = table[column].astype(object).where(table[column].notna(), None)
        pd.testing.assert_frame_equal(own, read, check_dtype=False)
