"""How long 1,000 cells take from the command line to checked specs: vitsweep beside stock Hydra.

    python benchmarks/compose_cells.py [--cells 1000] [--hydra-cells 20] [--rounds 3]

Both sides do the same work on the same cells: parse the grid, compose every cell, type it, resolve
every `auto`, apply all rules. Stock Hydra is its own sweeper, which composes each cell once to
validate it, and a launcher that composes it again to run it, as every launcher of Hydra does. It is
timed on some of the cells and scaled; both sides take turns, and the median of the rounds counts.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from kept import keep
from omegaconf import OmegaConf, open_dict

from vitsweep.composition import hydra
from vitsweep.composition.composer import Composer
from vitsweep.composition.grid import expand
from vitsweep.spec.from_yaml import cell_from_tree
from vitsweep.spec.menu import conf_dir
from vitsweep.spec.resolve import resolve
from vitsweep.spec.resources import Machine
from vitsweep.spec.rules import conflicts


def grid(cells: int) -> list[str]:
    """Return a sweep of that many cells over groups and values (rounded up to a multiple of 24)."""
    return [
        "precision=fp32,O1,O2,bf16",
        "sharding=ddp,fsdp",
        "optimizer=adamw_loop,adamw_foreach,adamw_contiguous",
        f"batch.images_per_step=range(64,{64 + 64 * -(-cells // 24)},64)",
        "measurement=smoke",
    ]


def checked(tree: dict[str, Any], machine: Machine) -> list[str]:
    """Type one cell and apply all rules."""
    return conflicts(cell_from_tree(resolve(tree, machine)))


def ours(overrides: Sequence[str], machine: Machine) -> int:
    """Expand and check a grid with vitsweep; everything is composed anew."""
    cells = expand(overrides, Composer())
    for cell in cells:
        checked(cell.tree, machine)
    return len(cells)


def stock(overrides: Sequence[str], machine: Machine, limit: int) -> int:
    """Expand and check the first cells of a grid with stock Hydra: its sweeper, then a launcher."""
    loader = hydra.open_loader(conf_dir())
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
    [batch] = BasicSweeper.split_arguments(parsed, None)
    batch = batch[:: max(1, len(batch) // limit)][:limit]
    master = hydra.compose(loader, "config", [])
    for cell in batch:
        loader.load_sweep_config(master, list(cell))  # BasicSweeper.validate_batch_is_legal
    for cell in batch:
        config = loader.load_sweep_config(master, list(cell))  # every launcher
        choices = hydra.choices(config)
        with open_dict(config):
            del config["hydra"]
        tree: Any = OmegaConf.to_container(config, resolve=True)
        for group, choice in choices.items():
            tree[group]["name"] = choice
        checked(tree, machine)
    return len(batch)


def milliseconds_per_cell(work: Callable[[], int]) -> float:
    """Return the wall time of one cell."""
    start = time.perf_counter()
    cells = work()
    return (time.perf_counter() - start) * 1e3 / cells


def main() -> None:
    """Time both in turns and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=1000)
    parser.add_argument("--hydra-cells", type=int, default=20, help="cells timed with stock Hydra")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    machine, overrides = Machine.here(), grid(options.cells)
    ours(grid(24), machine)  # imports of technique modules belong to neither side
    stock(grid(24), machine, 1)
    times: dict[str, list[float]] = {"vitsweep": [], "stock Hydra": []}
    for _ in range(options.rounds):
        times["vitsweep"].append(milliseconds_per_cell(lambda: ours(overrides, machine)))
        times["stock Hydra"].append(
            milliseconds_per_cell(lambda: stock(overrides, machine, options.hydra_cells))
        )
    for name, each in times.items():
        print(f"{name:12} {median(each):8.2f} ms per cell, {median(each):8.2f} s per 1,000 cells")
    ratio = median(times["stock Hydra"]) / median(times["vitsweep"])
    print(f"ratio        {ratio:8.1f}")
    figures = {"cells": options.cells, "ms_per_cell": times, "stock_over_vitsweep": round(ratio, 1)}
    keep("compose_cells", figures)


if __name__ == "__main__":
    main()
