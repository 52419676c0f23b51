"""DSP's sweeps, planned on paper at the paper's sizes: predicted throughput beside the published figure.

    python -m analysis.dsp_on_paper FOLDER [--hardware h100] [--one-per-node]

writes dsp_on_paper.csv and .png there.

Every cell is a step of the named sweep at the sizes that its comment gives for a cluster, traced as
`vitsweep plan` does (seconds per shape the first time, then kept). Nothing is fitted to the published
points. GPU and model of the paper's Figure 3 were never found, so that only ratios of two methods at the same
number of GPUs are compared, and they depend on the model's width and on the network.

What it says (November 2026): DSP is predicted 1.02 to 1.04 times as fast as Ulysses on 2 to 8 H100s of one
node, where Figure 3 has 1.43 to 3.19. DSP does send less: a third of Ulysses' numbers, with blocks
recomputed. It is two thirds of the bytes, since DSP moves the float32 residual stream, and Ulysses bfloat16
heads. But over NVLink communication is 3 to 9 % of Ulysses' predicted step, so that nothing that only saves
bytes can gain more. With each GPU on a node of its own (400 Gbit/s) it is 29 to 42 %, and the ratio 1.12 to
1.17 (64 x 4096 tokens). Bytes explain Figure 3 on neither network: a ratio of 3.19 leaves DSP 31 % of
Ulysses' time, and that must hold all of the computing, which both share. The authors' Ulysses spends its
time on something else: by their own documentation (VideoSys, docs/dsp.md) it makes 8 H800s 2.4 times as
fast as one, and DSP 4.8 times. Expect little of the choice between the two within a node, and measure it:
`+sweep=dsp_end_to_end`. Ring attention is predicted 0.45 to 0.89 times as fast as Ulysses, the less the
more GPUs: every rank sends all keys and values.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure
from pandas import DataFrame

from vitsweep.api.plan import machine_with
from vitsweep.charts import style
from vitsweep.composition.composer import Composer
from vitsweep.extras.predict.prediction import predict_cells
from vitsweep.extras.published.figures import published, with_conditions
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.rates.profile import profile_named
from vitsweep.spec.cell_spec import CellSpec

VIDEO = (
    "model=video_vit_720m data=synthetic_video data.num_distinct=1 precision=bf16 sharding=fsdp "
    "memory=recompute_blocks"
)
METHODS = ("ulysses", "dsp", "ring")
SHAPES = {(64, 4096): 1024, (128, 4096): 1024, (256, 4096): 1024, (128, 9216): 1536}
"""(temporal, spatial) tokens of Figure 3 -> pixels of a side."""
KEYS = ["study", "temporal", "spatial", "sp"]


def cells(*, one_per_node: bool = False) -> Iterator[tuple[dict[str, object], str]]:
    """Yield (what identifies a cell, its overrides) of the three sweeps at their cluster sizes."""
    for facts, overrides in _cells():
        where = f"resources.ranks_per_node={facts['sp']}"
        if one_per_node:
            where = f"resources.nodes={facts['sp']} resources.ranks_per_node=1"
        yield facts, f"{overrides} {where}"


def _cells() -> Iterator[tuple[dict[str, object], str]]:
    for method in METHODS:
        for (frames, spatial), side in SHAPES.items():
            for ranks in (2, 4, 8):
                yield _cell("dsp_end_to_end", method, frames, spatial, side, ranks, videos=1)
        for ranks in (2, 4, 8):
            yield _cell("dsp_weak_scaling", method, 32 * ranks, 4096, 1024, ranks, videos=1)
        for ranks in (1, 2, 4, 8):
            yield _cell("dsp_strong_scaling", method, 64, 1024, 512, ranks, videos=8)


def _cell(
    study: str, method: str, frames: int, spatial: int, side: int, ranks: int, *, videos: int
) -> tuple[dict[str, object], str]:
    facts: dict[str, object] = {
        "study": study, "method": method, "temporal": frames, "spatial": spatial, "sp": ranks,
    }  # fmt: skip
    sizes = f"data.num_frames={frames} batch.resolution_px={side} batch.images_per_step={videos}"
    return (
        facts,
        f"{VIDEO} {sizes} sequence_parallel={method}",
    )


def predicted(hardware: str, wanted: list[tuple[dict[str, object], str]]) -> DataFrame:
    """Return one row per cell: videos per second with an interval, exposed communication, peak, bytes.

    A cell that cannot run has its reason; one that needs more memory than the device has is kept and says so.
    """
    composer, machine = Composer(), machine_with(profile_named(hardware))
    specs: dict[str, CellSpec] = {}
    rows = []
    for number, (facts, overrides) in enumerate(wanted):
        planned = plan_cell(composer.compose(overrides.split()), machine)
        rows.append({**facts, "reason": " ".join(planned.reasons)})
        if not planned.reasons:
            specs[str(number)] = planned.spec
    for name, found in predict_cells(specs, hardware).items():
        step, row = found.step_time, rows[int(name)]
        if step is None or found.trace is None:
            row["reason"] = found.reason
            continue
        videos = 1e3 * found.cell.images_per_step
        row |= {
            "videos_per_second": videos / step.step_time_ms,
            "low": videos / step.high_ms,
            "high": videos / step.low_ms,
            "communication_share": step.parts_ms["communication"] / step.step_time_ms,
            "activation_gb_sent": 1e-9
            * sum(c.bytes_sent for c in found.trace.collectives if c.purpose == "activation"),
            "peak_gib": found.trace.memory.peak / 2**30,
            "fits": found.fits,
        }
    return DataFrame(rows)


def ratios(table: DataFrame) -> DataFrame:
    """Return DSP over Ulysses at the same shape and ranks: predicted, and published in Figure 3."""
    figures = (
        published("DSP v1 Fig. 3")
        .pipe(with_conditions)
        .assign(study="dsp_end_to_end")
        .pivot_table(index=KEYS, columns="system", values="number")
    )
    wide = table.pivot_table(index=KEYS, columns="method", values="videos_per_second")
    found = DataFrame({"predicted": wide["dsp"] / wide["ulysses"]})
    found["published"] = figures["DSP"] / figures["DeepSpeed-Ulysses"]
    return found.reset_index()


def draw(table: DataFrame) -> Figure:
    """Draw DSP over Ulysses with the published points, and the two scaling sweeps."""
    figure = style.empty_figure(12.0, 3.9)
    left, middle, right = (style.dress(figure.add_subplot(1, 3, place)) for place in (1, 2, 3))
    end_to_end = ratios(table).query("study == 'dsp_end_to_end'")
    for number, ((frames, spatial), rows) in enumerate(end_to_end.groupby(["temporal", "spatial"])):
        colour = style.PALETTE[number]
        label = f"{frames} x {spatial} tokens"
        left.plot(rows["sp"], rows["predicted"], marker="o", color=colour, label=label)
        left.plot(rows["sp"], rows["published"], "*", markersize=11, color=colour)
    left.plot([], [], "k*", label="published, Figure 3 (digitised)")
    left.set(ylabel="DSP over Ulysses")
    style.title(left, "dsp_end_to_end: predicted ratio")
    for axes, study, per in (
        (middle, "dsp_weak_scaling", "temporal"),
        (right, "dsp_strong_scaling", None),
    ):
        for method, rows in table[table["study"] == study].groupby("method"):
            rate = rows["videos_per_second"] * (rows[per] if per else 1)
            kind, name = "sequence_parallel", str(method)
            axes.plot(
                rows["sp"], rate, marker=style.MARKERS[style.place(kind, name)],
                color=style.colour(kind, name), label=name,
            )  # fmt: skip
        axes.set(ylabel="Predicted frames per second" if per else "Predicted videos per second")
        style.title(axes, study)
    for axes in (left, middle, right):
        axes.set(xscale="log", xlabel="GPUs")
        axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=7)
    return figure


def main() -> None:
    """Write the table and the chart."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--one-per-node", action="store_true", help="each GPU on a node of its own")
    arguments = parser.parse_args()
    table = predicted(arguments.hardware, list(cells(one_per_node=arguments.one_per_node)))
    arguments.folder.mkdir(parents=True, exist_ok=True)
    table.to_csv(arguments.folder / "dsp_on_paper.csv", index=False)
    draw(table).savefig(arguments.folder / "dsp_on_paper.png", dpi=150)
    print(table.round(3).to_string(index=False))
    print(ratios(table).round(2).to_string(index=False))


if __name__ == "__main__":
    main()
