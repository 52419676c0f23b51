"""What can be measured on one GPU in one call: peers, and the blog's techniques on ViT-B/16 and L/16.

    python benchmarks/gpu.py --out FOLDER [--smoke]

Runs in this order, so that a machine that is taken away early leaves the most wanted results:
GPU-marked tests, the blog's techniques one at a time and together, the peers. `--smoke` does the
same on any machine with small shapes.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOGETHER = "optimizer=adamw_fused classifier=pooled layout=batch_second"
TECHNIQUES = (
    *("precision=O1", "precision=O2", "precision=O3", "sharding=fsdp"),
    *("optimizer=adamw_foreach", "optimizer=adamw_fused", "optimizer=adamw_contiguous"),
    *("classifier=pooled", "layout=batch_second", "compilation=compile_blocks"),
    *(f"precision=O1 {TOGETHER}", f"precision=O3 {TOGETHER}"),
)
"""The blog's, each alone, all together under O1, all together in full half precision."""


def sweep(model: str, images_per_step: int, folder: Path, extra: list[str]) -> list[str]:
    """Return the command of one model's sweep."""
    cells = ",".join("['" + "','".join(texts.split()) + "']" for texts in TECHNIQUES)
    return [
        sys.executable, "-m", "vitsweep", "-m",
        f"model={model}", "data=synthetic", "resources.ranks_per_node=1",
        f"batch.images_per_step={images_per_step}",
        f"sweep.folder={folder}", f"sweep.name=blog_{model}", f"sweep.cells=[{cells}]",
        *extra,
    ]  # fmt: skip


def main() -> None:
    """Run everything; one failure does not keep the rest from running."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    work = arguments.out / "work"
    shape = (
        ["measurement=smoke", "batch.resolution_px=32", "model.depth=2"] if arguments.smoke else []
    )
    sizes = (
        {"vit_base": 8, "vit_large": 8} if arguments.smoke else {"vit_base": 128, "vit_large": 64}
    )
    tests = [sys.executable, "-m", "pytest", str(ROOT / "tests"), "-q", "-m", "gpu"]
    failed = run(tests) if not arguments.smoke else 0
    for model, images in sizes.items():
        failed |= run(sweep(model, images, work, shape))
        keep(work / f"blog_{model}", arguments.out)
    peers = [sys.executable, str(ROOT / "benchmarks" / "peers.py"), "--out", str(arguments.out)]
    peers += ["--smoke", "--blocks", "1"] if arguments.smoke else ["--device", "cuda"]
    failed |= run(peers)
    shutil.rmtree(work, ignore_errors=True)
    sys.exit(failed)


def run(command: list[str]) -> int:
    """Run a command from the checkout and show its output as it comes."""
    print("$", " ".join(command), flush=True)
    return int(
        subprocess.run(command, cwd=ROOT).returncode not in (0, 3)
    )  # 3: some cells are refused


def keep(sweep_folder: Path, out: Path) -> None:
    """Copy what a result file needs; raw records stay behind."""
    for name in ("cells.csv", "runs.parquet", "commands.jsonl", "report/index.html"):
        source = sweep_folder / name
        if source.exists():
            out.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, out / f"{sweep_folder.name}-{source.name}")


if __name__ == "__main__":
    main()
