"""Random valid cells, and the verdict of the proof on each.

`python -m tests.random_cells --cells 50 --seed 100 --ranks 2` prints each cell that is called wrong, and how
much of its bound each kind of comparison uses at most. Tests draw from seeds below 1000; the constants of
`vitsweep.proof.checks` were set on seeds from 1000 on.
"""

import argparse
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.cells import LAPTOP, TINY, entry
from tests.ranks import on_ranks, placed
from vitsweep.proof import checks, prove
from vitsweep.proof.faults import WrongResultError
from vitsweep.proof.twin import exact_twin, parts_of, twin_of
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.world import World

GROUPS = {
    "precision": "fp32 O0 O1 O2 O3 bf16 bf16_params bf16_masters O1 O2 O3",
    "precision.half_dtype": "- - float16",
    "sharding": "none ddp zero1 zero2 fsdp hsdp",
    "sharding.gradient_dtype": "- - - bfloat16",
    "optimizer": "adamw_loop adamw_foreach adamw_fused adamw_contiguous sgd_loop sgd_foreach sgd_fused "
    "sgd_contiguous muon",
    "optimizer.learning_rate": "- 0.003 0.0003",
    "optimizer.clip_norm": "- 0.5 0.05",
    "model": "- - vit_nano dinov2_small axial_vit_nano -",
    "model.mlp": "- - swiglu",
    "layout": "batch_first batch_second",
    "classifier": "token pooled",
    "attention": "sdpa_auto mha_module sdpa_math sdpa_flash linear sdpa_causal",
    "memory": "keep_all recompute_blocks recompute_selected",
    "vit_block": "plain plain drop_samples parallel",
    "tokens": "all all drop registers",
    "sequence_parallel": "none none none ulysses ring usp lss lasp lasp2 dsp megatron_sp",
    "tensor_parallel": "none none none megatron",
    "pipeline_parallel": "none none none gpipe one_f_one_b",
    "batch.accumulation_steps": "1 1 2 3",
    "averaging": "none ema",
}
MOST_DRAWS = 200_000


def random_cells(seed: int, number: int, ranks: int) -> list[CellSpec]:
    """Draw choices of each group until so many cells are valid; most draws change a few groups only."""
    generator = random.Random(seed)
    return [cell for cell, _ in zip(_valid(generator, ranks), range(number), strict=False)]


def _valid(generator: random.Random, ranks: int) -> Iterator[CellSpec]:
    for _ in range(MOST_DRAWS):
        few = generator.sample([g for g in GROUPS if g != "precision"], generator.randint(1, 6))
        chosen = {g: generator.choice(GROUPS[g].split()) for g in ("precision", *few)}
        chosen = {key: value for key, value in chosen.items() if value != "-"}
        words = [f"{key}={value}" for key, value in chosen.items()]
        if "sharding" not in chosen and ranks == 1:
            words.append("sharding=none")
        images = f"batch.images_per_step={generator.choice((18, 24, 30, 36)) * ranks}"
        own = [f"resources.ranks_per_node={ranks}", f"seed={generator.randrange(10**6)}"]
        try:
            planned = entry(
                *TINY,
                "model.depth=4",
                *words,
                images,
                *own,
                "resources.threads_per_rank=1",
                machine=LAPTOP,
            )
        except Exception:  # a setting that the choice does not have
            continue
        if not planned.reasons:
            vars(planned.spec)["words"] = " ".join([*words, own[1]])
            yield planned.spec


def verdicts(world: World, cells: list[CellSpec]) -> list[dict[str, Any]]:
    """Prove each cell; return its verdict, and the largest share of a bound by kind of comparison."""
    used: dict[str, tuple[float, str]] = {}
    furthest = checks.furthest

    def watched(what: str, apart: Any, bounds: Any, norms: Any) -> str:
        for name, distance in apart.items():
            share = distance / (bounds[name] or 1e-300) if distance else 0.0
            if share > used.get(what, (0.0, ""))[0]:
                used[what] = (share, f"{name} {distance / (norms[name] or 1):.2g}")
        return furthest(what, apart, bounds, norms)

    checks.furthest = watched
    answers = []
    for cell in cells:
        used.clear()
        begin = time.process_time()
        legs = [exact_twin(twin_of(cell)), twin_of(cell)]
        bit_for_bit = False
        kinds: dict[str, Any] = {}
        verdict = "equal"
        try:
            prove._prove_optimizer(legs[-1], world)
            parts = parts_of(legs[0], world)
            for leg in dict.fromkeys(legs):
                used.clear()
                _, told = prove._leg(leg, placed(world, cell), parts, bit_for_bit)
                parts = parts.rounded
                bit_for_bit = prove.BIT_FOR_BIT in told
                kinds |= {f"{leg.precision.name} {k}": v for k, v in used.items()}
        except WrongResultError as error:
            verdict = f"wrong: {error}"
            kinds |= {f"{leg.precision.name} {k}": v for k, v in used.items()}
        except Exception as error:
            verdict = f"raised: {error!r}"
            answers.append({"verdict": verdict[:600], "used": {}, "seconds": 0.0})
            break
        answers.append({"verdict": verdict, "used": kinds, "seconds": time.process_time() - begin})
    checks.furthest = furthest
    return answers


def main() -> None:
    """Draw, prove, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    cells = random_cells(options.seed, options.cells, options.ranks)
    most: dict[str, tuple[float, str, str]] = defaultdict(lambda: (0.0, "", ""))
    done, seconds, wrong = 0, 0.0, 0
    while cells:
        with tempfile.TemporaryDirectory() as folder:
            found = on_ranks(
                options.ranks, verdicts, cells[0], cells, folder=Path(folder), seconds=3000
            )[0]
        for cell, answer in zip(cells, found, strict=False):
            words = vars(cell)["words"]
            seconds += answer["seconds"]
            done += 1
            if answer["verdict"] != "equal":
                wrong += 1
                print(f"{words}\n   {answer['verdict']}", flush=True)
            for kind, (share, where) in answer["used"].items():
                if share > most[kind][0]:
                    most[kind] = (share, where, words)
        cells = cells[len(found) :]
    print(f"{done} cells on {options.ranks} ranks, {wrong} wrong, {seconds / done:.2f} s each")
    for kind, (share, where, words) in sorted(most.items()):
        print(f"{kind:34} {share:.3g} of the bound at {where} ({words})")


if __name__ == "__main__":
    main()
