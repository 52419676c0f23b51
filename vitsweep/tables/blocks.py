"""Runs side by side: log throughput per block, ratios over the baseline, and cells freed of block effects.

The effects of blocks are taken out by least squares within blocks, where the effects model, the probability
of being on the Pareto front and the like start; and by medians for the throughput that tables show.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas import DataFrame, Series

from vitsweep.tables.stats import spread_factor
from vitsweep.tables.valid_runs import checked_runs, valid_runs

Floats = NDArray[np.float64]

ROW = "row"
"""Column with the number of the measured row of a run (`valid_runs.keyed`)."""
BLOCK = ["sweep", "device", "block"]
"""Columns that identify a block. Runs of one block on different devices are never compared."""


def log_throughput_per_block(runs: DataFrame, by: str = "cell_id") -> DataFrame:
    """Return a row per cell and block: its key, `log_throughput, nodes_used, any_look`.

    `any_look` tells whether the command looked at its intervals while it measured. Runs without a
    throughput above zero are left out.

    Args:
        runs: one row per run.
        by: column that says which runs belong together: `cell_id`, or the `row` of `keyed`.
    """
    throughput = runs["images_per_second"].to_numpy(float, na_value=np.nan)
    columns = [by, *BLOCK, "images_per_second", "nodes_used", "any_look"]
    read = [c for c in columns if c in runs]  # of more than a hundred
    usable = runs.loc[np.isfinite(throughput) & (throughput > 0), read]
    defaults = {"nodes_used": None, "device": "", "any_look": False}
    unknown = {c: value for c, value in defaults.items() if c not in usable}
    table = usable.assign(
        log_throughput=np.log(usable["images_per_second"].astype(float)), **unknown
    )
    looked = table["any_look"].eq(True).fillna(False).astype(bool)
    device = table["device"].astype(object).where(table["device"].notna(), "")
    return (
        table.assign(device=device, any_look=looked)
        .groupby([by, *BLOCK], observed=True, sort=False)
        .agg(
            log_throughput=("log_throughput", "mean"),
            nodes_used=("nodes_used", "first"),
            any_look=("any_look", "any"),
        )
        .reset_index()
    )


def log_ratios(
    per_block: DataFrame, baselines: Mapping[Any, Any], by: str = "cell_id"
) -> DataFrame:
    """Return `<by>, sweep, device, block, any_look, log_ratio` of blocks with a pair.

    A pair is a variant and its baseline. Both must have run on the same device and on the same nodes:
    when a block is requeued onto other nodes, its remaining runs do not pair with those before.

    Args:
        per_block: of `log_throughput_per_block`, with the same `by`.
        baselines: cell or row -> that of its baseline, or None.
        by: `cell_id`, or `row`.
    """
    variant = per_block.assign(
        _baseline=per_block[by].map(lambda c: baselines.get(c)).astype(object)
    )
    different = variant["_baseline"].notna() & (variant["_baseline"] != variant[by].astype(object))
    base = (
        per_block.drop(columns="any_look", errors="ignore")
        .rename(
            columns={
                by: "_baseline",
                "log_throughput": "log_baseline",
                "nodes_used": "nodes_of_baseline",
            }
        )
        .astype({"_baseline": object})
    )
    both = variant[different].merge(base, on=["_baseline", *BLOCK])
    together = map(share_nodes, both["nodes_used"], both["nodes_of_baseline"])
    return both[np.fromiter(together, bool, len(both))].assign(
        log_ratio=lambda t: t["log_throughput"] - t["log_baseline"]
    )


def share_nodes(left: object, right: object) -> bool:
    """Return whether one list of nodes contains the other; an unknown list counts as the same."""
    if not isinstance(left, str) or not isinstance(right, str) or left == right:
        return True
    a, b = set(left.split(",")), set(right.split(","))
    return a <= b or b <= a


MOST_ITERATIONS = 100
SETTLED = 1e-7
"""The polish ends where no log changes by more than this."""


def median_polish(per_block: DataFrame, by: str = "cell_id") -> DataFrame:
    """Take the effects of blocks out of log throughput by medians, which single runs that stall do not move.

    Each log is `level` of its cell + effect of its block + `rest` (median polish: Tukey 1977, Exploratory
    Data Analysis, chapter 11). The medians begin at the cell with the most blocks, and reach the others over
    shared blocks: of cells that were measured on different days, both levels are of one day. Among the
    blocks that cells connect, the median effect is 0. Runs on other nodes are in another block
    (`share_nodes`).

    Args:
        per_block: of `log_throughput_per_block`, with the same `by`.
        by: column that says which runs belong together.

    Returns:
        The rows with `level` and `rest`, natural logs; both NaN for a cell that shares no block.
    """
    cell = Series(pd.factorize(per_block[by])[0], per_block.index)
    block = Series(_blocks(per_block), per_block.index)
    logs, part = per_block["log_throughput"], _connected(cell, block)
    most = DataFrame({"cell": cell, "part": part, "blocks": cell.map(cell.value_counts())})
    most = most.sort_values(["blocks", "cell"], ascending=[False, True]).drop_duplicates("part")
    level = Series(np.nan, range(cell.nunique()))
    level[most["cell"]] = 0.0
    for _ in range(MOST_ITERATIONS):
        effect = (logs - cell.map(level)).groupby(block).median()
        before, level = level, (logs - block.map(effect)).groupby(cell).median()
        if ((level - before).abs() < SETTLED).all():
            break
    middle = part.map(effect.groupby(part.groupby(block).first()).median())
    is_alone = cell.groupby(part).transform("nunique") == 1
    own, rest = cell.map(level), logs - cell.map(level) - block.map(effect)
    return per_block.assign(level=(own + middle).mask(is_alone), rest=rest.mask(is_alone))


def _connected(cell: Series, block: Series) -> Series:
    """Return for each run the first of the blocks that shared cells connect with its own."""
    part, before = block, Series(dtype=int)
    while not part.equals(before):
        before = part
        part = part.groupby(cell).transform("min").groupby(block).transform("min")
    return part


@dataclass(frozen=True, eq=False)
class WithinBlocks:
    """Sufficient statistics of `log(images/s) = cell + block + noise` with free block effects.

    Attributes:
        cells: cell ids, in the order of their first run.
        information: cells x cells; the inverse covariance of the cells' logs times the noise's
            variance. Its null space holds what no block compares, the common level first of all.
        total: per cell, the sum over its blocks of its log minus the mean log of the block.
        num_blocks: per cell.
        residual: sum of squares that neither cells nor blocks explain.
        degrees: degrees of freedom of `residual`.
        seen: cells x blocks, 1 where the cell ran in the block, else 0; oldest block first.
        rest: cells x blocks, what neither cells nor blocks explain of a log.
        any_look: a command looked at its intervals while it measured.
    """

    cells: list[str]
    information: Floats
    total: Floats
    num_blocks: NDArray[np.int64]
    residual: float
    degrees: int
    seen: Floats
    rest: Floats
    any_look: bool = False

    @cached_property
    def spectrum(self) -> tuple[Floats, Floats]:
        """Eigenvalues above 0 of `information` (descending) and their vectors as columns."""
        values, vectors = np.linalg.eigh(self.information)
        kept = values > 1e-9 * max(float(values.max(initial=0.0)), 1.0)
        return values[kept][::-1], vectors[:, kept][:, ::-1]

    @property
    def logs(self) -> Floats:
        """Estimated log throughput per cell; only differences within connected cells mean anything."""
        values, vectors = self.spectrum
        estimate: Floats = vectors @ ((vectors.T @ self.total) / values)
        return estimate

    @property
    def noise(self) -> float:
        """Standard deviation of one run's log; NaN where no cell was measured in two blocks."""
        return float(np.sqrt(self.residual / self.degrees)) if self.degrees > 0 else float("nan")

    def variance_over_blocks(self, weights: Floats) -> tuple[Floats, Floats]:
        """Return the variance of weighted sums of `total`, and its degrees of freedom.

        Each sum is a sum over blocks, of one contrast of the cells in each. Its variance comes from the
        spread of these contrasts, so cells may differ in noise and runs of a block may depend on one
        another; with the same cells in all blocks it is that of Student's t over blocks. Each square
        is divided by its expectation under equal noise, the degrees are Satterthwaite's (Bell and McCaffrey
        2002, Survey Methodology 28). From 12 blocks on `stats.spread_factor` widens it.

        Args:
            weights: sums x cells.
        """
        values, vectors = self.spectrum
        runs, root = self.seen.sum(axis=0), vectors / np.sqrt(values)
        variances, degrees = np.zeros((2, len(weights)))
        for i, weight in enumerate(weights):
            parts = self.seen * (weight[:, None] - weight @ self.seen / np.maximum(runs, 1))
            sizes, turned = (parts**2).sum(axis=0), root.T @ parts
            expected = sizes - (turned**2).sum(axis=0)
            used = expected > 1e-9 * sizes.max(initial=0.0)
            scale = np.sqrt(sizes[used] / expected[used])
            contrasts = scale * (weight @ self.rest)[used]
            turned = turned[:, used] * scale
            whole = np.diag(sizes[used] * scale**2) - turned.T @ turned
            fixed = sizes[~used].sum() * np.nan_to_num(self.noise) ** 2
            widened = spread_factor(contrasts / np.sqrt(sizes[used])) ** 2
            variances[i] = widened * contrasts @ contrasts + fixed
            degrees[i] = np.trace(whole) ** 2 / max(float((whole**2).sum()), 1e-300)
        return variances, np.maximum(degrees, 1.0)


def within_blocks(runs: DataFrame) -> WithinBlocks:
    """Take the effects of blocks out of the log throughput of the measured runs.

    Runs without a finite throughput above 0 are left out; several runs of a cell in one block count
    as their mean.

    Args:
        runs: one row per run: `cell_id, sweep, block, status, images_per_second` (img/s).

    Raises:
        VitsweepError: a column is missing or does not hold what its name says.
    """
    per_block = log_throughput_per_block(valid_runs(checked_runs(runs)))
    reduced = _reduced(per_block["cell_id"], _blocks(per_block), per_block["log_throughput"])
    return replace(reduced, any_look=bool(per_block["any_look"].any()))


def _blocks(per_block: DataFrame) -> NDArray[np.int64]:
    """Return the number of each row's block; what was requeued onto other nodes is another block."""
    block = per_block.groupby(BLOCK, sort=False, dropna=False).ngroup()
    nodes = per_block["nodes_used"].astype(object)
    apart = nodes.groupby(block).nunique() > 1
    part = Series(0, per_block.index)
    for number in apart.index[apart]:
        groups: list[str] = []
        known = nodes[block == number].dropna().astype(str)
        for row in known.str.count(",").sort_values(ascending=False, kind="stable").index:
            found = [i for i, group in enumerate(groups) if share_nodes(group, known[row])]
            part[row] = found[0] if found else len(groups)
            groups += [] if found else [known[row]]
    parts = DataFrame({"block": block, "part": part}).groupby(["block", "part"])
    return np.asarray(parts.ngroup(), dtype=np.int64)


def _reduced(cell_ids: Series, block: NDArray[np.int64], logs: Series) -> WithinBlocks:
    cell, cells = pd.factorize(cell_ids)
    value = logs.to_numpy(float)
    num_blocks = int(block.max()) + 1 if len(block) else 0
    seen = np.zeros((len(cells), num_blocks))
    seen[cell, block] = 1.0
    sizes = seen.sum(axis=0)
    means = np.bincount(block, value, num_blocks) / np.maximum(sizes, 1)
    centred = value - means[block]
    information = np.diag(seen.sum(axis=1)) - (seen / np.maximum(sizes, 1)) @ seen.T
    total = np.bincount(cell, centred, len(cells)).astype(float)
    runs = seen.sum(axis=1).astype(np.int64)
    reduced = WithinBlocks(list(cells), information, total, runs, 0.0, 0, seen, seen)
    degrees = len(value) - num_blocks - len(reduced.spectrum[0])
    explained = seen * reduced.logs[:, None]
    rest = seen * (explained.sum(axis=0) / np.maximum(sizes, 1)) - explained
    rest[cell, block] += centred
    return replace(reduced, residual=float((rest**2).sum()), degrees=max(degrees, 0), rest=rest)
