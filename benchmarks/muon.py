"""The optimizer step of Muon, batched, beside torch's one matrix after the other, in turns on this machine.

python benchmarks/muon.py [--model vit_small] [--rounds 6]
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.cells import entry
from vitsweep.model.build import build_model
from vitsweep.training.update import parameter_groups


def main() -> None:
    """Print the milliseconds of both and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="vit_small")
    parser.add_argument("--rounds", type=int, default=6)
    typed = parser.parse_args()
    spec = entry(f"model={typed.model}", "data=synthetic", "optimizer=muon").spec
    optimizers = {}
    for name, choice in {"batched": spec.optimizer, "torch": spec.optimizer.plain()}.items():
        torch.manual_seed(0)
        model = build_model(spec)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizers[name] = choice.build(parameter_groups(model, choice.weight_decay))
        optimizers[name].step()
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for number in range(typed.rounds):
        for name in sorted(optimizers, reverse=bool(number % 2)):
            begin = time.perf_counter()
            optimizers[name].step()
            times[name].append(1e3 * (time.perf_counter() - begin))
    ratios = [b / t for b, t in zip(times["batched"], times["torch"], strict=True)]
    print(f"{typed.model}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name, each in times.items():
        print(f"{name}: {statistics.median(each):.0f} ms ({min(each):.0f} to {max(each):.0f})")
    print(
        f"batched / torch: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
