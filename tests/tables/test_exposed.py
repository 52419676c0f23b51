"""Exposed communication of scaling curves, against known step times."""

import math

import numpy as np
import pytest
from pandas import DataFrame

from tests.builders import run, table
from vitsweep.errors import VitsweepError
from vitsweep.results.record import Status
from vitsweep.tables.scaling import exposed_communication

RANKS = (1, 2, 4, 8)


def curve(*args, **kwargs):
    return table(*records(*args, **kwargs))


def records(step_ms, images, blocks=1, noise=0.0, seed=0, apart=False, shared=(), **metrics):
    """Runs of one curve: step time and metrics as functions of the number of ranks."""
    generator = np.random.default_rng(seed)
    rows = []
    for b in range(blocks):
        pace = math.exp(generator.normal(0, 0.2 if noise else 0.0))
        for n in RANKS:
            step = step_ms(n) * pace * math.exp(generator.normal(0, noise))
            size = {
                "world_size": n,
                "ranks_per_node": n,
                "images_per_step": images(n),
                "seed": seed,
            }
            rows.append(
                run(
                    f"{seed}-n{n}", f"{seed}-{b}-{n if apart else ''}", 1000 * images(n) / step, minute=b,
                    metrics={name: value(n) for name, value in metrics.items()},
                    validity={"oversubscribed": n in shared}, **size,
                )
            )  # fmt: skip
    return rows


def amdahl(n):
    return 10.0 + 90.0 / n


def constant(images):
    return lambda n: images


def per_rank(n):
    return 64 * n


def sent(n):
    return 1e8 * (n - 1) / n


def with_bytes(n):
    return 50.0 + sent(n) / 2e7  # 20 GB/s


def test_sizes_that_shared_no_block_have_means_and_no_interval():
    """The difference between two jobs, such as that of their nodes, is in every block of a size."""
    kwargs = {"noise": 0.03, "apart": True, "communication_ms": lambda n: 50.0}
    runs = curve(amdahl, constant(64), blocks=4, **kwargs)
    last = exposed_communication(runs, {}).iloc[-1]
    mean_ms = (1000 * 64 / runs["images_per_second"]).groupby(runs["world_size"]).mean()
    assert last["exposed_ms"] == pytest.approx(mean_ms[8] - mean_ms[1] / 8)
    assert math.isnan(last["exposed_ms_low"])
    assert last["num_blocks"] == 0
    assert last["note"].startswith("unpaired")


def test_what_compute_does_not_hide_is_exposed():
    runs = curve(
        with_bytes, per_rank, blocks=3, gradient_bytes_per_step=sent,
        communication_ms=lambda n: 0.0 if n == 1 else 4.0,
    )  # fmt: skip
    found = exposed_communication(runs, {}).set_index("world_size")
    assert found.loc[2, "exposed_ms"] == pytest.approx(2.5)
    assert found.loc[2, "overlapped_ms"] == pytest.approx(1.5)
    assert found.loc[4, "exposed_share"] == pytest.approx(3.75 / 53.75)
    assert found.loc[8, "overlapped_ms"] == 0.0
    # 8 ranks take 4.375 ms more, of which collectives take 4
    assert found.loc[8, "exposed_ms"] == 4.0
    assert found.loc[8, ["exposed_ms_low", "exposed_ms_high"]].isna().all(), "it is all of them"
    assert found.loc[2, ["exposed_ms_low", "exposed_ms_high"]].notna().all()
    assert found["rest_ms"].tolist() == pytest.approx([0.0, 0.0, 0.0, 0.375])
    assert (found["note"] == "").all()
    assert found.loc[1, ["exposed_ms", "communication_ms"]].tolist() == [0.0, 0.0]


def test_strong_scaling_divides_the_computation():
    runs = curve(amdahl, constant(64), blocks=3, communication_ms=lambda n: 20.0)
    found = exposed_communication(runs, {})
    last = found.set_index("world_size").loc[8]
    assert last["compute_ms"] == pytest.approx(100 / 8)
    assert last["exposed_ms"] == pytest.approx(amdahl(8) - 100 / 8)
    assert last["exposed_ms_low"] == pytest.approx(last["exposed_ms_high"])
    assert last["overlapped_ms"] == pytest.approx(20 - 8.75)


def test_nothing_is_exposed_where_no_collective_was_timed():
    found = exposed_communication(curve(amdahl, constant(64), blocks=3), {})
    assert found.loc[found["world_size"] > 1, ["exposed_ms", "overlapped_ms"]].isna().all(axis=None)


def test_tables_without_a_curve_give_an_empty_table():
    for runs in [
        DataFrame(),
        table(run("a")).iloc[:0],
        table(run("a")),
        table(run("a", status=Status.failed, reason="...")),
        table(run("a", images_per_second=None), run("b", images_per_second=None)),
        table(run("a"), run("a"), run("a")),
        curve(amdahl, constant(64)).drop(columns="world_size"),
        curve(amdahl, constant(64)).drop(columns="images_per_step"),
    ]:
        found = exposed_communication(runs, {})
        assert found.empty
        assert "curve" in found


@pytest.mark.parametrize("column", ["cell_id", "block", "status"])
def test_a_missing_column_is_named(column):
    with pytest.raises(VitsweepError, match=f"Column `{column}`"):
        exposed_communication(curve(amdahl, constant(64)).drop(columns=column), {})
