"""Published scaling curves, planned on paper: predicted throughput at sizes that nobody here has.

    python -m analysis.on_paper FOLDER      # writes on_paper.csv and on_paper.png there

Step times come from hardware profiles by the closed formulas of `analysis.closed_trace`, in a second; nothing
is measured and nothing fitted to the published points. Intervals are meant to hold 80 % of measurements.

**Meta's blog (1.83x over DDP at 64 GPUs).** Which GPUs and which model was not published. On A100 with
ViT-H/16 at 70 images per GPU, FSDP with O1 is predicted 11.9x as fast as DDP in plain float32, but 1.9x as
fast as DDP in TF32, which was PyTorch's default for products until 1.12: the blog's baseline fits TF32.
Both baselines are drawn. The formulas know neither the gain of `batch_second` nor that of the pooled
classifier.

**Frontier (94 % batch-scaling efficiency at 2,048 dies of MI250X).** How the efficiency was normalised was
not published; here it is throughput per GPU relative to the first point of a curve. FSDP over all GPUs is
predicted to keep 76 % from 8 to 2,048 dies, sharding within 64 dies 96 % from 128 on: the published figure
fits a layout whose exchanges of parameters do not grow with the machine. The rate of products of an MI250X
has no source, which shifts all points of a curve together and cancels in the efficiency; the figures of its
network do not cancel.

**DSP** works on videos with two axes of tokens, for which there are no closed formulas:
`analysis.dsp_on_paper` traces its sweeps instead.
"""

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from matplotlib.figure import Figure
from pandas import DataFrame

from analysis.closed_trace import closed_trace
from vitsweep.charts import style
from vitsweep.composition.composer import Composer
from vitsweep.extras.predict.profile_rates import TableRates
from vitsweep.extras.predict.step_time import predict_step
from vitsweep.extras.published.figures import published
from vitsweep.planning.closed_memory import Sizes
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.rates.profile import profile_named
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.resources import Machine

META = "model=vit_huge_16 data=synthetic batch=blog_560 batch.images_per_step=70 batch.scope=per_replica"
META_CELLS = {
    "DDP, float32": "sharding=ddp precision=fp32 optimizer=adamw_loop",
    "DDP, TF32": "sharding=ddp precision=tf32 optimizer=adamw_loop",
    "FSDP, O1, foreach": "precision=O1 sharding=fsdp optimizer=adamw_foreach classifier=pooled",
}
META_WORLDS = ((1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8))
FRONTIER = (
    "model=vit_10b data=synthetic batch.resolution_px=448 batch.images_per_step=8 batch.scope=per_replica "
    "classifier=pooled precision=bf16 memory=recompute_blocks optimizer=adamw_fused"
)
FRONTIER_CELLS = {
    "FSDP x Ulysses 8": "sharding=fsdp sequence_parallel=ulysses mesh.ulysses=8",
    "HSDP in 64 x Ulysses 8": "sharding=hsdp mesh.shard=8 sequence_parallel=ulysses mesh.ulysses=8",
    "FSDP x tensor 8": "sharding=fsdp tensor_parallel=megatron mesh.tensor=8",
}
FRONTIER_WORLDS = tuple((nodes, 8) for nodes in (1, 4, 16, 64, 256))


@cache
def _composer() -> Composer:
    return Composer()


def predicted(overrides: str, nodes: int, per_node: int, hardware: str) -> dict[str, float] | None:
    """Return images per second with interval, or None for a cell that cannot run there."""
    device = profile_named(hardware)
    machine = Machine(
        device="cuda", cores_per_node=64, devices_per_node=per_node, described_by=hardware
    )
    words = [*overrides.split(), f"resources.nodes={nodes}", f"resources.ranks_per_node={per_node}"]
    planned = plan_cell(_composer().compose(words), machine)
    if planned.reasons:
        return None
    cell: CellSpec = planned.spec
    found = predict_step(
        closed_trace(Sizes.of(cell)),
        TableRates(device),
        tf32=cell.precision.plan().tf32,
    )
    images = 1e3 * cell.images_per_step
    return {
        "images_per_second": images / found.step_time_ms,
        "low": images / found.high_ms,
        "high": images / found.low_ms,
        "waits": 1 - found.parts_ms["compute"] / found.step_time_ms,
    }


def curves() -> DataFrame:
    """Return one row per study, curve and number of GPUs."""
    return DataFrame(_rows())


def _rows() -> Iterator[dict[str, object]]:
    for study, hardware, base, cells, worlds in (
        ("meta_gpu_scaling", "a100_80g", META, META_CELLS, META_WORLDS),
        ("frontier_batch_scaling", "mi250x", FRONTIER, FRONTIER_CELLS, FRONTIER_WORLDS),
    ):
        for name, overrides in cells.items():
            first: float | None = None
            for nodes, per_node in worlds:
                found = predicted(f"{base} {overrides}", nodes, per_node, hardware)
                if found is None:
                    continue
                gpus = nodes * per_node
                per_gpu = found["images_per_second"] / gpus
                first = first or per_gpu
                yield {
                    "study": study, "hardware": hardware, "curve": name, "gpus": gpus, **found,
                    "efficiency": per_gpu / first,
                }  # fmt: skip


def draw(table: DataFrame) -> Figure:
    """Draw the speedup over DDP in float32, and the efficiency, with the published points."""
    figure = style.empty_figure(9.6, 3.9)
    meta = table[table["study"] == "meta_gpu_scaling"]
    speeds = meta.pivot(index="gpus", columns="curve", values="images_per_second")
    left, right = (style.dress(figure.add_subplot(1, 2, place)) for place in (1, 2))
    for name in ("DDP, float32", "DDP, TF32"):
        speedup = speeds["FSDP, O1, foreach"] / speeds[name]
        left.plot(
            speeds.index, speedup, marker="o", label=f"predicted: FSDP, O1, foreach over {name}"
        )
    figures = published("Meta AI", metric="speedup_vs_ddp")
    left.plot(
        [64], figures["value"].astype(float), "k*", markersize=12, label="published, over DDP"
    )
    left.set(xscale="log", yscale="log", xlabel="GPUs (A100)", ylabel="Speedup")
    left.set_xticks(speeds.index, [str(gpus) for gpus in speeds.index])
    left.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    left.minorticks_off()
    style.title(left, "meta_gpu_scaling, ViT-H/16")
    frontier = table[table["study"] == "frontier_batch_scaling"]
    for name, points in frontier.groupby("curve", sort=False):
        right.plot(points["gpus"], points["efficiency"], marker="o", label=f"predicted: {name}")
    claims = published("2405.15780", metric="batch_scaling_efficiency")
    right.plot([2048], claims["value"].astype(float) / 100, "k*", markersize=12, label="published")
    right.set(
        xscale="log",
        xlabel="GPUs (MI250X dies)",
        ylabel="Weak-scaling efficiency (1)",
        ylim=(0, 1.1),
    )
    sizes = sorted(frontier["gpus"].unique())
    right.set_xticks(sizes, [str(gpus) for gpus in sizes])
    right.minorticks_off()
    style.title(right, "frontier_batch_scaling, 10 B parameters")
    for axes in (left, right):
        axes.legend(fontsize=7)
    return figure


def main(folder: Path) -> None:
    """Write the table and the chart."""
    table = curves()
    folder.mkdir(parents=True, exist_ok=True)
    table.to_csv(folder / "on_paper.csv", index=False)
    draw(table).savefig(folder / "on_paper.png", dpi=150)
    print(table.round(3).to_string(index=False))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
