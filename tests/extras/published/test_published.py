"""Every figure a source printed stands in its table with that source; nothing doubtful does."""

import math

import numpy as np
import pandas as pd
import pytest
import yaml
from rich.console import Console

from analysis import dsp, frontier, lasp, menu_2026, meta_blog, usp
from analysis.meta_blog import entries_of
from analysis.study import rounded
from tests import sample_sweep
from tests.builders import from_runs, run, table
from tests.cells import GPU_NODE, composer
from vitsweep.api.session import open_session
from vitsweep.charts import speedup, style
from vitsweep.cli.main import run as main
from vitsweep.composition.grid import expand
from vitsweep.extras.published.figures import (
    MOST_FIGURES,
    SURENESS,
    beside_cells,
    beside_text,
    conditions,
    entry_problem,
    published,
)
from vitsweep.extras.published.shown import figures_of
from vitsweep.planning.freeze import freeze, open_store
from vitsweep.planning.sweep_plan import SweepPlan, plan_of
from vitsweep.report.html import write_report
from vitsweep.results.record import Status
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import flatten
from vitsweep.spec.menu import conf_dir
from vitsweep.tables.cells import cells
from vitsweep.tables.formatting import as_text
from vitsweep.tables.sweep_tables import SweepTables

STUDIES = {
    "Meta AI blog|pytorch PR #": meta_blog,
    "DSP|VideoSys": dsp,
    "USP|yunchang|ring-flash|Ring Attention|DeepSpeed-Ulysses": usp,
    "LASP": lasp,
    "2405.15780|2311.02382": frontier,
    "nvSub|NeMo|OpenCLIP|DINOv|mup-vit|mmpretrain|timm issue|lightly|torchao": menu_2026,
}


@pytest.fixture
def sweeps():
    return {name: sample_sweep.sweep(name) for name in sample_sweep.KINDS}


@pytest.mark.parametrize(("source", "study"), STUDIES.items(), ids=str)
def test_every_printed_figure_appears_with_its_source(source, study, sweeps):
    tables = [as_text(table(sweeps["speedups"])) for table in study.TABLES.values()]
    rows = [" | ".join(row) for table in tables for row in table.to_numpy()]
    missing = [
        (figure.value, figure.source)
        for figure in published(source).itertuples()
        if not any(_holds(row, figure) for row in rows)
    ]
    assert not missing


def _planned(name: str) -> pd.DataFrame:
    plan = plan_of(expand([f"+sweep={name}"], composer()), GPU_NODE, composer())
    rows = [
        flatten(entry.spec)
        | {"cell_id": cell_id, "status": "measured", "baseline_cell_id": plan.baselines[cell_id]}
        | ({"claim": "baseline"} if plan.baselines[cell_id] == cell_id else {})
        for cell_id, entry in plan.entries.items()
    ]
    return pd.DataFrame(rows)


OUT_OF_REACH = (
    "meta_gpu_scaling",
    "frontier_batch_scaling",
    "frontier_batch_scaling_cluster",
    "lasp_lengths",
)
"""Their figures are of 8, 64 and 2,048 GPUs, which their cells do not ask for as they are."""
NAMING = [
    path.stem
    for path in sorted((conf_dir() / "sweep").glob("*.yaml"))
    if "published" in yaml.safe_load(path.read_text())
]


@pytest.mark.slow
def test_what_a_named_sweep_says_of_figures_matches_its_cells_and_the_transcription():
    assert len(NAMING) == 17
    for name in NAMING:
        planned = _planned(name)
        for entry in entries_of(name):
            assert not entry_problem(entry)
            partners = beside_cells(planned, [entry])["cell_id"]
            assert partners.notna().any() == (name not in OUT_OF_REACH), (name, entry)
    blog = beside_cells(_planned("meta_speedups_cluster"), entries_of("meta_speedups_cluster"))
    assert blog["cell_id"].is_unique
    assert blog["value"].tolist() == ["1.51", "1.86", "2.18"]


def test_a_command_keeps_the_figures_that_its_named_sweep_lists(tmp_path):
    session = open_session(["+sweep=frontier_batch_scaling", f"sweep.folder={tmp_path}"], Console())
    freeze(open_store(session.settings), SweepPlan({}), session.settings, {})
    rows = SweepTables.of(Store(session.settings.path)).commands[0]["published"]
    assert rows == entries_of("frontier_batch_scaling")


@pytest.fixture(scope="module")
def blog_folder(tmp_path_factory):
    """A sweep that names the blog's figures; the cell of one is measured, one ran out of memory."""
    store = Store(tmp_path_factory.mktemp("published") / "blog").create()
    fast = {"precision": "O1", "optimizer": "adamw_foreach", "classifier": "pooled"}
    for i in range(3):
        store.save_run(run("base", f"b{i}", 100 + i, minute=i, precision="tf32", sharding="none"))
        at_560 = {"batch": "blog_560", "images_per_step": 560, "sharding": "none"}
        store.save_run(run("fast", f"b{i}", 200 + 3 * i, minute=i, **fast, **at_560))
    died = run("half", status=Status.out_of_memory, reason="", batch="blog_384_256px",
               **{**fast, "precision": "O3"})  # fmt: skip
    store.save_run(died)
    baselines = dict.fromkeys(("base", "fast", "half"), "base")
    hostile = [1, {"figures": []}, {**entries_of("meta_speedups")[0], "cell": {}}]
    store.append_command(
        {
            "command": "",
            "baselines": baselines,
            "published": [*entries_of("meta_speedups"), *hostile],
        }
    )
    return store.root


def test_an_entry_that_names_nothing_is_refused(capsys):
    rest = ",column:speedup,cell:{precision:O1},conditions:{}"
    for more, named in (("", "`column`"), (rest, "`vitsweep/extras/published/published.csv`")):
        typed = f"sweep.published=[{{figures:{{source:x}}{more}}}]"
        assert main(["plan", "--no-predict", typed]) == 2
        assert named in capsys.readouterr().err


def test_figures_stand_next_to_the_cells_with_what_differs(blog_folder):
    rows = figures_of(SweepTables.read(blog_folder)).set_index("experiment")
    assert rows["cell_id"].fillna("").to_dict() == {
        "batch560": "fast", "full_fp16": "half", "batch384_im256": ""
    }  # fmt: skip
    assert rows.loc["batch560", "measured"] == pytest.approx(2.0, rel=0.02)
    assert rows.loc["batch560", "differs"] == [
        "baseline.sharding ddp, here none",
        "sharding fsdp, here none", "layout batch_second, here batch_first",
    ]  # fmt: skip
    assert {"model", "device", "torch"} <= set(rows.loc["batch560", "unknown"])
    assert rows["note"].tolist()[1:] == ["out of memory", "not measured here"]


@pytest.mark.smoke
def test_terminal_report_and_chart_show_them_with_their_source(blog_folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["collect", str(blog_folder)]) == 0
    shown = capsys.readouterr().out
    assert "Meta AI blog (2022-05-05) (secondary: read in a text that quotes the source" in shown
    page = write_report(blog_folder).read_text()
    section = page.partition('id="published-and-measured"')[2].partition("<h2")[0]
    for text in (shown, section):
        assert all(words in text for words in ("1.51x", "1.86x", "2.18x", "not measured here"))
    chart = speedup.draw(speedup.table_of(SweepTables.read(blog_folder)))
    [axes] = chart.axes
    marks = [line for line in axes.lines if line.get_marker() == "D" and len(line.get_xdata())]
    assert [line.get_xdata().tolist() for line in marks] == [[1.51], [2.18], [1.86]]
    written = [text.get_text() for text in axes.texts]
    starts = ["2.18x (no interval)", "1.86x (no interval)"]
    assert [text.partition("  ")[0] for text in written[-2:]] == starts
    names = [text.get_text().replace("\n", " ") for text in axes.get_yticklabels()[-2:]]
    assert names == ["O3 + ddp + adamw_foreach + pooled + blog_384_256px", "batch384_im256"]
    assert all(name in " ".join(section.split()) for name in names)
    assert marks[0].get_markerfacecolor() == style.PAPER
    legend = [text.get_text() for text in chart.legends[0].get_texts()]
    assert "published: Meta AI blog (2022-05-05)" in legend


def test_a_folder_of_somebody_else_shows_few_figures_and_no_value_of_its_own(blog_folder):
    entry = {"figures": {"metric": "throughput"}, "column": "reason", "cell": {"status": "measured"},
             "conditions": {"value": "9.99"}}  # fmt: skip
    table = beside_cells(SweepTables.read(blog_folder).cells, [entry] * 100)
    assert len(table) == MOST_FIGURES
    assert set(table["value"]) <= set(published()["value"])
    assert table["measured"].isna().all()
    assert len(beside_text(table, SweepTables.read(blog_folder).cells)[0]) == len(table)


def _holds(row, figure):
    values = {figure.value, str(figure.number).removesuffix(".0")}
    cells = row.split(" | ")
    return figure.source in cells and figure.sure in cells and any(v in cells for v in values)


def test_the_seven_numbers_of_the_blog(sweeps):
    settings = meta_blog.settings(sweeps["speedups"]).set_index("experiment")
    assert settings["value"].to_dict() == {
        "batch560": "1.51", "batch384_im256": "1.86", "full_fp16": "2.18"
    }  # fmt: skip
    rest = 0.96 * 1.08 * 1.01
    assert settings.loc["full_fp16", "measured"] == pytest.approx(1.6 * rest * 1.15, rel=0.02)
    assert settings.loc["batch560", "measured"] == pytest.approx(1.3 * rest * 1.05, rel=0.02)
    hours = meta_blog.epochs(sweeps["speedups"]).drop_duplicates("system").set_index("system")
    assert hours["value"].to_dict() == {"ddp-baseline": "0.65", "pycls-vit-optimized": "0.43"}
    scaling = meta_blog.gpu_scaling(sweeps["scaling"]).set_index("world_size")
    assert scaling.loc[64, "published_value"] == "1.83"
    assert scaling.drop(index=64)["published_value"].isna().all()
    assert "4.05" in meta_blog.chips(sweeps["speedups"])["published_value"].tolist()


def test_what_was_not_found_stays_empty(sweeps):
    assert meta_blog.cumulative(sweeps["speedups"])["published_speedup"].isna().all()
    volumes = dsp.communication_volume(sweeps["sequences"])
    assert not volumes["published_value"].astype(str).str.contains("Megatron-LM").any()


def test_doubtful_rows_are_left_out_unless_asked_for():
    doubtful = published(doubtful=True).query("doubt.notna()")
    about = doubtful["doubt"] == "about"
    assert sorted(doubtful[~about]["value"]) == [
        "0.39", "0.41", "0.44", "121.83", "129.44", "137.48"
    ]  # fmt: skip
    assert sorted(doubtful[about]["value"]) == ["18.5", "34", "57", "93"]
    assert not published()["value"].isin(["121.83", "129.44", "137.48"]).any()


def test_rows_of_the_menu_are_sorted_rounded_and_distinguished(sweeps):
    rows = menu_2026.throughput(sweeps["speedups"])
    about = rows[rows["doubt"] == "about"]
    assert set(about["model"]) == {"DINOv3 7B", "DINOv2 ViT-L/16"}
    is_measured = rows["sure"] == "measured"
    shares = pd.to_numeric(rows[~is_measured]["mfu_percent"]).dropna()
    assert shares.is_monotonic_decreasing
    assert shares.iloc[0] == 57
    measured = rows[is_measured]
    assert not measured["conditions"].duplicated().any()
    assert measured["images_per_second_per_gpu"].str.fullmatch(r"[\d,]+(\.\d{1,2})?").all()


def test_doubtful_figures_appear_in_no_table(sweeps):
    for study_table in usp.TABLES.values():
        text = as_text(study_table(sweeps["sequences"])).to_csv()
        assert not any(value in text for value in ("121.83", "129.44", "137.48", ",86,"))


def test_every_figure_says_how_sure_it_is_and_where_it_was_read():
    figures = published(doubtful=True)
    assert set(figures["sure"]) == set(SURENESS)
    assert figures[["source", "where", "value"]].notna().all().all()
    assert not figures["value"].str.contains("NOT FOUND").any()


def test_conditions_become_columns():
    text = "16xA800 (2 nodes); seq 64K; global_bs 1; tp 4; ulysses 2; ring 2"
    assert conditions(text) == {
        "gpus": 16, "gpu": "A800", "seq": 65536, "global_bs": 1, "tp": 4, "ulysses": 2, "ring": 2
    }  # fmt: skip
    assert conditions("2,048 AMD MI250X") == {"gpus": 2048}
    assert conditions("sp=2; temporal=64") == {"sp": 2, "temporal": 64}
    assert conditions("full FP16") == {}


def test_digitised_ratios_agree_with_the_printed_extremes():
    digitised = published("DSP v1 Fig. 3")
    wide = digitised.pivot(index="conditions", columns="system", values="number")
    ratio = wide["DSP"] / wide["DeepSpeed-Ulysses"]
    # the abstract of the first version: +42.0 % to +216.8 %
    assert (ratio.min(), ratio.max()) == pytest.approx((1.42, 3.168), abs=0.03)


def test_measured_rows_stand_next_to_published_ones(sweeps):
    rows = usp.attention(sweeps["sequences"])
    both = rows[rows["cell_id"].notna() & rows["published_iterations_per_second"].notna()]
    assert set(both["seq"]) == {8192}
    assert set(both["method"]) == {"ulysses", "ring"}
    weak = frontier.batch_scaling(sweeps["scaling"]).set_index("gpus")
    assert weak.loc[2048, "published_value"] == "94"
    assert math.isnan(weak.loc[2048, "efficiency"])
    assert weak.loc[2, "efficiency"].tolist() == pytest.approx([0.95] * 2, abs=0.02)
    assert weak.loc[8, "efficiency_note"].str.contains("shared CPU cores").all()
    longest = lasp.longest_sequence(sweeps["sequences"]).set_index(["method", "gpus"])
    assert longest.loc[("ulysses", 8), "max_sequence"] == 8192
    assert longest.loc[("ulysses", 8), "out_of_memory_at"] == 16384


def test_video_cells_stand_next_to_the_plot_by_temporal_spatial_and_degree():
    video = {"model.frames": 64, "model.tubelet_frames": 1, "num_tokens": 64 * 4096}
    runs = table(
        run("d", "b0", 3.0, sequence_parallel="dsp", **video, **{"mesh.sequence": 2}),
        run("u", "b0", 2.0, sequence_parallel="ulysses", **video, **{"mesh.ulysses": 2}),
    )
    rows = dsp.end_to_end(from_runs(runs, {}, cells(runs, {}))).set_index(
        ["temporal", "spatial", "sp"]
    )
    assert rows.loc[(64, 4096, 2), "ratio (no interval)"] == pytest.approx(1.5)
    assert rows.loc[(64, 4096, 2), "published_ratio (no interval)"] == pytest.approx(0.985 / 0.69)
    assert rows["ratio (no interval)"].notna().sum() == 1


def test_measured_conditions_are_printed_with_every_comparison(sweeps):
    settings = meta_blog.settings(sweeps["speedups"])
    assert settings["here"].str.contains("2xAMD EPYC 7B13; model vit_nano").all()
    assert settings["conditions"].notna().all()


def test_a_sweep_without_what_a_study_needs_gives_the_published_side_alone(sweeps):
    for study in STUDIES.values():
        for study_table in study.TABLES.values():
            assert isinstance(study_table(sweeps["scaling"]), pd.DataFrame)


def test_numbers_are_rounded_for_reading_only():
    table = rounded(pd.DataFrame({"a": [1.23456, np.nan], "b": [8.0, np.nan]}))
    assert as_text(table).to_numpy().tolist() == [["1.23", "8"], ["", ""]]
