"""What the newer techniques cost and save on this machine, each beside its plain version, in turns.

    python benchmarks/menu_2026.py [--rounds 15] [--parts drop_samples averaging]

Two parts, whose bounds are printed with them:

- `drop_samples`: training steps of ViT-Ti at 224 px, with `vit_block=drop_samples` at 40 % and without.
- `averaging`: an update of the average of a ViT's weights, by `averaging=ema` and by the loop over
  `state_dict` that is usually written (`ema.copy_(decay * ema + (1 - decay) * value)`).

Both sides of a ratio run in turns in one process; the median of the ratios of the rounds is kept, with
its range.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from kept import RESULTS, keep

from vitsweep.composition.composer import Composer
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.resources import Machine
from vitsweep.training.trainer import Trainer
from vitsweep.world import World

MACHINE = Machine(device="cpu", cores_per_node=2, devices_per_node=0, described_by="benchmark")
ALONE = ("resources.ranks_per_node=1", "sharding=none", "data=synthetic")


def cell(composer: Composer, *overrides: str) -> CellSpec:
    """Compose one cell of one rank."""
    entry = plan_cell(composer.compose([*ALONE, *overrides]), MACHINE)
    assert not entry.reasons, entry.reasons
    return entry.spec


def trainer(spec: CellSpec) -> tuple[Trainer, Any]:
    """Return a trainer and a batch for it."""
    torch.manual_seed(0)
    device = torch.device("cpu")
    world = World(rank=0, local_rank=0, size=1, device=device, shape=spec.mesh, mesh=None)
    images = torch.randn(spec.micro_batch, *spec.model.input_shape(spec.batch.resolution_px))
    labels = torch.randint(spec.model.num_classes, (spec.micro_batch,))
    return parallelize(build_model(spec), spec, world), (images, labels)


def in_turns(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each side in each round, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        order = list(sides) if number % 2 else list(reversed(sides))
        for name in order:
            begin = time.perf_counter()
            sides[name]()
            if number:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def compared(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, Any]:
    """Return times and the ratio of the first side over the second."""
    plain, other = seconds = list(in_turns(sides, rounds).values())
    ratios = [a / b for a, b in zip(plain, other, strict=True)]
    return {
        "rounds": rounds,
        "milliseconds": {n: round(1e3 * median(s), 3) for n, s in zip(sides, seconds, strict=True)},
        "ratio": round(median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def drop_samples(composer: Composer, rounds: int) -> dict[str, Any]:
    """Training steps of ViT-Ti with and without dropped images."""
    sides: dict[str, Callable[[], object]] = {}
    for name in ("plain", "drop_samples"):
        spec = cell(composer, "model=vit_tiny", "batch.images_per_step=20", f"vit_block={name}")
        trains, batch = trainer(spec)
        sides[name] = lambda trains=trains, batch=batch: trains.step(iter([batch]))
    return compared(sides, rounds)


def averaging(composer: Composer, rounds: int) -> dict[str, Any]:
    """One update of the average, for models of several sizes."""
    found = {}
    for model in ("vit_nano", "vit_tiny", "vit_small"):
        spec = cell(composer, f"model={model}", "averaging=ema", "batch.images_per_step=1")
        trains, _ = trainer(spec)
        ema = {n: v.clone() for n, v in trains.model.state_dict().items()}

        @torch.no_grad()
        def loop(trains: Trainer = trains, ema: dict[str, torch.Tensor] = ema) -> None:
            for name, value in trains.model.state_dict().items():
                ema[name].copy_(0.9999 * ema[name] + (1 - 0.9999) * value)

        average = trains.average
        assert average is not None
        sides = {"loop": loop, "ema": lambda average=average: average.update(10**6)}
        found[model] = compared(sides, 5 * rounds) | {"tensors": len(ema)}
    return found


PARTS = {"drop_samples": drop_samples, "averaging": averaging}


def main() -> None:
    """Run the parts and keep what they found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    composer = Composer()
    found: dict[str, Any] = {"threads": asked.threads}
    for part in asked.parts:
        found[part] = PARTS[part](composer, asked.rounds)
        print(part, found[part], flush=True)
    keep("menu_2026", found, asked.out)


if __name__ == "__main__":
    main()
