"""Images per second of every loader, beside a plain PyTorch DataLoader and SPDL, in one run.

    python benchmarks/loaders.py [--out FOLDER] [--images 1000] [--rounds 5] [--workers 2] [--smoke]

All of them read the same generated JPEGs of 500 x 375 px, cut and resize them as ImageNet training does (a
random part of 8 to 100 % of the area, 224 px, mirrored at random), and deliver normalised float32 batches
of 64 on the CPU. Contenders take turns within a round, in another order each time; a ratio is the
median over rounds of two contenders' figures in the same round.

`plain` is what a training script of torchvision does, with the same Pillow calls (torchvision has no
build for CPUs): open, random part, resize, mirror, to float32 and normalised in worker processes of a
DataLoader, collated. `spdl` runs the same function in its threads (`pip install spdl`; left out where it
is missing). Images per second and core are images by the CPU seconds that all processes of a contender used:
other programs on the machine disturb them less than they disturb the clock.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from kept import keep
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitsweep.composition.composer import Composer
from vitsweep.data.decoded_cache import as_rgb, cut, random_box
from vitsweep.data.folder_files import Files, files
from vitsweep.data.image_loader import DEVIATION, MEAN
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.spec.resources import AXES, Machine, MeshShape
from vitsweep.world import World

WIDTH, HEIGHT, SIDE, BATCH, CLASSES = 500, 375, 224, 64, 10
OURS = ("workers", "decoded_cache")
Epoch = Callable[[int], Iterator[tuple[Tensor, Tensor]]]


def write_images(root: Path, count: int) -> float:
    """Write JPEGs whose spectrum falls as that of photographs; return their mean size in KB."""
    generator = np.random.default_rng(0)
    waves = np.hypot(np.fft.fftfreq(HEIGHT)[:, None], np.fft.rfftfreq(WIDTH)[None, :])
    waves[0, 0] = 1
    for index in range(count + CLASSES):
        split = "train" if index < count else "val"
        folder = root / split / f"class_{index % CLASSES}"
        folder.mkdir(parents=True, exist_ok=True)
        noise = generator.standard_normal((3, HEIGHT, WIDTH))
        fields = np.fft.irfft2(np.fft.rfft2(noise) / waves**1.1, s=(HEIGHT, WIDTH))
        fields = 128 + 48 * fields / fields.std(axis=(1, 2), keepdims=True)
        pixels = fields.clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
        Image.fromarray(pixels).save(folder / f"{index}.jpg", quality=90)
    sizes = [path.stat().st_size for path in root.rglob("*.jpg")]
    return statistics.mean(sizes) / 1000


class PlainImages(Dataset[tuple[Tensor, int]]):
    """An ImageFolder with the usual transforms, by Pillow."""

    def __init__(self, found: Files) -> None:
        self.files = found
        self._mean, self._deviation = (torch.tensor(v).view(3, 1, 1) for v in (MEAN, DEVIATION))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        """Return a normalised float32 image (3, H, W) and its label."""
        with Image.open(self.files.path(row)) as file:
            image = as_rgb(file)
        draw = np.random.default_rng()
        box = random_box(*image.size, 0.08, draw)
        pixels = np.ascontiguousarray(cut(image, box, SIDE, mirrored=bool(draw.random() < 0.5)))
        whole = torch.from_numpy(pixels).permute(2, 0, 1).contiguous().float().div_(255)
        return whole.sub_(self._mean).div_(self._deviation), int(self.files.labels[row])


def plain(root: Path, workers: int) -> Epoch:
    """Return epochs of a DataLoader whose workers stay."""
    loader = DataLoader(
        PlainImages(files(str(root), "train")),
        BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=True,
        drop_last=True,
    )
    return lambda epoch: iter(loader)


def spdl(root: Path, workers: int) -> Epoch:
    """Return epochs of SPDL's pipeline with the same function for each image."""
    from spdl.pipeline import PipelineBuilder

    images = PlainImages(files(str(root), "train"))

    def collate(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        pictures, labels = zip(*items, strict=True)
        return torch.stack(pictures), torch.tensor(labels)

    def epoch(number: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = np.random.default_rng(number).permutation(len(images)).tolist()
        pipeline = (
            PipelineBuilder()
            .add_source(order)
            .pipe(images.__getitem__, concurrency=workers)
            .aggregate(BATCH, drop_last=True)
            .pipe(collate)
            .add_sink(2)
            .build(num_threads=workers + 1)
        )
        with pipeline.auto_stop():
            yield from pipeline

    return epoch


def ours(name: str, root: Path, workers: int) -> Epoch:
    """Return epochs of `data=image_folder` with a loader."""
    overrides = [
        "model=vit_tiny", "data=image_folder", f"data.folder={root}", f"data.num_workers={workers}",
        f"loader={name}", f"batch.images_per_step={BATCH}", "resources.ranks_per_node=1",
        "resources.device=cpu",
    ]  # fmt: skip
    if name == "decoded_cache":
        overrides.append(f"loader.folder={root.parent}/decoded")
    machine = Machine(device="cpu", cores_per_node=os.cpu_count() or 1, devices_per_node=0)
    cell = plan_cell(Composer().compose(overrides), machine).spec
    alone = MeshShape(**dict.fromkeys(AXES, 1))
    world = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), shape=alone, mesh=None)
    data: Any = cell.data
    return data.open(cell, world).train


def cpu_seconds() -> float:
    """CPU time of this process and of all below it that are alive."""
    process = psutil.Process()
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def measured(epoch: Epoch, epochs: int) -> dict[str, float]:
    """Read some epochs after a first one; return images by seconds and by CPU seconds."""
    for _ in epoch(0):
        pass
    begin, used = time.perf_counter(), cpu_seconds()
    images = sum(len(batch) for number in range(1, epochs + 1) for batch, _ in epoch(number))
    used = cpu_seconds() - used
    seconds = time.perf_counter() - begin
    return {"images_per_second": images / seconds, "images_per_cpu_second": images / used}


def main() -> None:
    """Measure all contenders and keep their table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--epochs", type=int, default=2, help="per round, after a first one")
    parser.add_argument("--smoke", action="store_true", help="few images, one round")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smoke:
        options.images, options.rounds, options.epochs = 2 * BATCH, 1, 1
    if options.one:
        torch.set_num_threads(1)
        name, folder = options.one
        print(json.dumps(measured(contender(name, Path(folder), options.workers), options.epochs)))
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "images")
        mean_kb = write_images(root, options.images)
        begin = time.perf_counter()
        contender("decoded_cache", root, options.workers)
        decoding = time.perf_counter() - begin
        names = [*OURS, "plain", *(["spdl"] if find_spec("spdl") is not None else [])]
        rows = [one_round(names, root, number, options) for number in range(options.rounds)]
    table = summary(rows)
    for name, row in table.items():
        print(name.ljust(14), {key: round(value, 2) for key, value in row.items()})
    figures = {
        "images": options.images, "mean_kb": round(mean_kb, 1), "workers": options.workers,
        "decoding_once_seconds": round(decoding, 2), "table": table, "rounds": rows,
    }  # fmt: skip
    keep("loaders", figures, *([options.out] if options.out else []))


def contender(name: str, root: Path, workers: int) -> Epoch:
    """Return the epochs of a contender."""
    if name in OURS:
        return ours(name, root, workers)
    return plain(root, workers) if name == "plain" else spdl(root, workers)


def one_round(
    names: list[str], root: Path, number: int, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Measure every contender in a process of its own, in an order of this round."""
    row = {}
    for name in random.Random(number).sample(names, len(names)):
        sizes = [f"--epochs={options.epochs}", f"--workers={options.workers}"]
        command = [sys.executable, __file__, *sizes, "--one", name, str(root)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        row[name] = json.loads(done.stdout.splitlines()[-1])
        print(f"round {number + 1}: {name} {row[name]}", file=sys.stderr, flush=True)
    return {name: row[name] for name in names}


def summary(rows: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return medians over rounds, and ratios to `plain` within rounds."""
    table = {}
    for name in rows[0]:
        table[name] = {
            key: statistics.median(row[name][key] for row in rows) for key in rows[0][name]
        }
        for key in rows[0][name]:
            ratios = [row[name][key] / row["plain"][key] for row in rows]
            table[name][f"{key}_over_plain"] = statistics.median(ratios)
    return table


if __name__ == "__main__":
    main()
