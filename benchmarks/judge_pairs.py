"""How often is `vitsweep judge` right? Real pairs of commits whose true difference is known.

    python -m benchmarks.judge_pairs FOLDER [--pairs 40] [--minutes 0.75] [--delays 0 0.02 0.05 0.1] [--keep]

Each pair is two commits of a small repository: the head differs by a comment, and waits in each step for a
share of the time that the step took. Three workloads take turns. A verdict is a line of `FOLDER/pairs.jsonl`;
the same command goes on where it was stopped. Of the same blocks two common rules answer as well: one number
of each side, and the median of five, which both claim a difference of more than 5 %. `power` is that of the
judge's rule: the share of 1,000 simulated commands that claim the delay, with the spread and the number of
blocks that each pair had. `detectable` is what `plan` calls so: by one t-test over as many blocks.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import time
from collections import Counter
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kept import RESULTS, keep
from vitsweep.extras.judge.session import judge
from vitsweep.extras.judge.trial import LEAST_BLOCKS
from vitsweep.extras.judge.verb_judge import judge_request
from vitsweep.tables.stats import any_look_half_width, minimum_detectable_effect

MODELS = {
    "perceptron": [
        "nn.Flatten(), nn.Linear(side**2, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10)"
    ],
    "convolutions": [
        "nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()",
        "nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10)",
    ],
    "attention": [
        "nn.Flatten(1, 2), nn.Linear(side, 96)",
        "nn.TransformerEncoderLayer(96, 4, 192, dropout=0.0, batch_first=True)",
        "nn.Flatten(), nn.Linear(96 * side, 10)",
    ],
}
TRAIN = """\
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

DELAY = {delay}


def make_step(cell):
    side = cell.resolution_px
    model = nn.Sequential({layers})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch):
        begin = time.perf_counter()
        images, labels = batch
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        end = begin + (1 + DELAY) * (time.perf_counter() - begin)
        while time.perf_counter() < end:
            pass
        return loss

    return step
"""
CLAIMED = math.log(1.05)
"""The common rules claim what differs by more."""


def repository(folder: Path, model: str, delay: float) -> Path:
    """Make a repository of two commits."""
    root = folder / f"{model}-{delay:g}"
    if (root / ".git").is_dir():
        return root
    root.mkdir(parents=True)

    def git(*words: str) -> None:
        identity = ("-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost")
        subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True)

    git("init", "--quiet")
    for message, text in (
        ("Base", TRAIN.format(delay=0.0, layers=", ".join(MODELS[model]))),
        ("Head", TRAIN.format(delay=delay, layers=", ".join(MODELS[model])) + "# the head\n"),
    ):
        (root / "train.py").write_text(text, encoding="utf-8")
        git("add", "train.py")
        git("commit", "--quiet", "--message", message)
    return root


def pair(root: Path, minutes: float) -> dict[str, Any]:
    """Judge the two commits of a repository."""
    words = ["HEAD~1", "HEAD", "--step", "train.py:make_step", "--minutes", str(minutes)]
    words += ["data=digits", "batch.images_per_step=64", "resources.threads_per_rank=1"]
    load, begin = os.getloadavg()[0], time.monotonic()
    with chdir(root):
        judged = judge(judge_request(words)[0], lambda text: None)
    lines = (judged.folder / "runs.jsonl").read_text(encoding="utf-8").splitlines()
    blocks: dict[str, dict[str, float]] = {}
    for run in map(json.loads, lines):
        if run["block"].startswith(("block-", "repeat-")) and run["status"] == "measured":
            blocks.setdefault(run["block"], {})[run["side"]] = run["seconds"]
    whole = [block for block in blocks.values() if len(block) == 2]
    return {
        **{k: v for k, v in judged.verdict.json().items() if k in ("answer", "speed", "repeated")},
        "base_s": [block["base"] for block in whole],
        "head_s": [block["head"] for block in whole],
        "load": load,
        "took_s": time.monotonic() - begin,
    }


def claims(pairs: list[dict[str, Any]], rule: str) -> "Counter[str]":
    """Return how often a rule said what of the heads."""
    found: Counter[str] = Counter()
    for each in pairs:
        if rule == "judge":
            found[each["answer"]] += 1
            continue
        taken = 1 if rule == "one number" else 5
        base, head = (
            statistics.median(each[side][:taken] or [1.0]) for side in ("base_s", "head_s")
        )
        log = math.log(base / head)
        found["faster" if log > CLAIMED else "slower" if log < -CLAIMED else "no difference"] += 1
    return found


def power(pairs: list[dict[str, Any]], delay: float, draws: int = 1000) -> dict[str, float]:
    """Return the share of simulated commands that claim the delay, and what `plan` calls detectable."""
    random, shares, effects = np.random.default_rng(0), [], []
    for each in pairs:
        logs = np.log(each["base_s"]) - np.log(each["head_s"])
        if (number := len(logs)) < LEAST_BLOCKS:
            shares.append(0.0)
            continue
        spread = float(logs.std(ddof=1))
        drawn = spread * random.standard_normal((draws, number)) - math.log1p(delay)
        shown = np.zeros(draws, bool)
        for n in range(LEAST_BLOCKS, number + 1):
            halves = any_look_half_width(drawn[:, :n].std(axis=1, ddof=1), n)
            shown |= drawn[:, :n].mean(axis=1) + halves < 0
        shares.append(float(shown.mean()))
        effects.append(minimum_detectable_effect(number, 1, spread))
    return {
        "power": statistics.fmean(shares) if shares else 0.0,
        "detectable": statistics.median(effects) if effects else math.inf,
    }


def main() -> None:
    """Judge the pairs that are missing, and print what was said of each delay."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("folder", type=Path)
    options.add_argument("--pairs", type=int, default=40, help="of each delay")
    options.add_argument("--minutes", type=float, default=0.75)
    options.add_argument("--delays", type=float, nargs="+", default=[0.0])
    options.add_argument(
        "--keep", action="store_true", help="write the table to benchmarks/results"
    )
    typed = options.parse_args()
    folder = typed.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "pairs.jsonl"
    done = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    models = list(MODELS)
    for number in range(typed.pairs):
        for delay in typed.delays:
            if sum(each["delay"] == delay for each in done) > number:
                continue
            model = models[number % len(models)]
            found = {"delay": delay, "workload": model, "minutes": typed.minutes}
            found |= pair(repository(folder, model, delay), typed.minutes)
            done.append(found)
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
            print(number, delay, model, found["answer"], len(found["base_s"]), flush=True)
    table = {}
    for delay in sorted({each["delay"] for each in done}):
        pairs = [each for each in done if each["delay"] == delay]
        rules = {rule: claims(pairs, rule) for rule in ("judge", "one number", "median of 5")}
        blocks = statistics.median(len(each["base_s"]) for each in pairs)
        table[f"{delay:g}"] = {
            "pairs": len(pairs),
            "blocks": blocks,
            **rules,
            **power(pairs, delay),
        }
    print(json.dumps(table, indent=1))
    if typed.keep:
        keep("judge_pairs", {"table": table, "pairs": done}, RESULTS)


if __name__ == "__main__":
    main()
