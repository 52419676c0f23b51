"""The benchmarks run, at a size that says nothing about speed."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from tests.cells import GPU_NODE, composer, entry
from vitsweep.api.plan import machine_with
from vitsweep.measure.environment import DeviceState
from vitsweep.planning.machine_defaults import cells_for
from vitsweep.planning.sweep_plan import plan_of
from vitsweep.rates.profile import profile_named
from vitsweep.techniques.sequence_parallel.ring_attention import Plain

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


FIRST = ["product", "peers", "attention", "one_at_a_time", "soak", "profile"]
LATER = ["smoke", "prediction", "models", "speedups", "first", "windows", "one_rank"]
"""Parts that run where they are asked for."""
RESULTS = {"report.md", "figures.json", "records.tar.gz"}
"""Files that come back; a borrowed machine gives at most 8."""


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the parts of `gpu.py` import one another, as in its processes."""
    monkeypatch.syspath_prepend(BENCHMARKS)


def run(script: str, *arguments: str | Path, timeout: float = 900) -> None:
    command = [sys.executable, BENCHMARKS / script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_peers_are_compared_in_paired_blocks_with_intervals(tmp_path: Path) -> None:
    size = ("--smoke", "--blocks", "3", "--models", "vit_tiny", "--precisions", "fp32")
    run("peers.py", *size, "--out", tmp_path)
    [kept] = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    [table] = kept["tables"]
    rows = {row["contender"]: row for row in table["rows"]}
    assert {"vitsweep batch_first", "transformers sdpa"} <= set(rows)
    others = [row for row in rows.values() if row["contender"] != row["vitsweep_best"]]
    assert all(row["low"] < row["vitsweep_speedup"] < row["high"] for row in others)
    assert all(row["step_ms"] > 0 and row["peak_gib"] > 0.1 for row in rows.values())
    assert kept["date"]
    assert kept["environment"]["device"]


@pytest.mark.full
def test_loaders_are_measured_against_the_reference(tmp_path: Path) -> None:
    run("loaders.py", "--smoke", "--workers", "1", "--out", tmp_path)
    [kept] = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert {"workers", "threads", "decoded_cache", "plain"} <= set(kept["table"])
    for row in kept["table"].values():
        assert row["images_per_second"] > 0
        assert row["images_per_cpu_second"] > 0
    assert kept["table"]["plain"]["images_per_second_over_plain"] == 1


@pytest.mark.full
def test_phases_are_compared_with_the_step_that_they_are_of(tmp_path: Path) -> None:
    size = ("--blocks", "1", "model.depth=1", "batch.images_per_step=8")
    command = [
        sys.executable,
        "-m",
        "benchmarks.phases",
        "--out",
        tmp_path,
        "--keep",
        tmp_path,
        *size,
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=900, cwd=BENCHMARKS.parent)
    [kept] = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    rows = [(row["ranks"], row["sharding"]) for row in kept["rows"]]
    assert rows == [(1, "ddp"), (1, "fsdp"), (2, "ddp"), (2, "fsdp")]
    assert all(0 < row["over_own_step"] <= 1 and row["over_timed_step"] > 0 for row in kept["rows"])


@pytest.mark.parametrize("names", [FIRST, LATER, ["attention"]], ids=",".join)
def test_the_parts_of_the_gpu_benchmark_fill_its_minutes(names: list[str]) -> None:
    command = [sys.executable, BENCHMARKS / "gpu.py", "--dry", "--parts", ",".join(names)]
    for minutes in ("2", "9"):
        command = [*command, "--minutes", minutes]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        lines = [line.split() for line in done.stdout.splitlines()]
        heads = [line for line in lines if line[0] != "-"]
        items = [line[1:] for line in lines if line[0] == "-"]
        assert sum(float(seconds) for seconds, *_ in heads) == pytest.approx(
            60 * int(minutes), abs=4
        )
        assert [name for _, _, name, *_ in heads] == names
        assert 0.2 * 60 * int(minutes) < sum(float(seconds) for seconds, *_ in items)
        assert sum(float(seconds) for seconds, *_ in items) < 60 * int(minutes)


def test_a_part_that_is_none_is_refused() -> None:
    command = [sys.executable, BENCHMARKS / "gpu.py", "--dry", "--parts", "peers,soke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 2
    assert "part soke: " in done.stderr
    assert " product, peers, " in done.stderr


@pytest.mark.usefixtures("beside")
def test_the_commands_for_one_gpu_have_cells_that_run_on_it() -> None:
    import gpu_list

    found = {}
    machine = replace(machine_with(profile_named("h200")), devices_per_node=1)
    for part in gpu_list.PARTS:
        for item in part.items if part.name in gpu_list.COMMANDS else ():
            cells, sweep, _ = cells_for(shlex.split(item)[1:], composer(), machine)
            plan = plan_of(cells, machine, composer())
            assert len(plan.runnable) == len(plan.entries)
            found[sweep["name"]] = len(plan.entries)
    sizes = {"meta_speedups-cuda": 17, "first-cuda": 4, "windows_1.5": 3, "windows_10": 3}
    assert found == sizes | {"one_rank": 2}


def test_the_products_cells_and_the_best_stacks_run_on_a_gpu() -> None:
    import gpu_list

    one = ("model=vit_large", *gpu_list.ONE_RANK)
    beside = [(*cell, "optimizer=adamw_fused") for cell in gpu_list.PRODUCT_CELLS]
    for choices in (*beside, *gpu_list.STACKS.values()):
        assert not entry(*one, *choices, machine=GPU_NODE).reasons, choices


@pytest.mark.usefixtures("beside")
def test_ranges_that_a_program_names_are_no_kernels() -> None:
    import gpu_profile

    def on_gpu(name: str, start_us: int, end_us: int, *, named: bool = False) -> FunctionEvent:
        return FunctionEvent(
            0, name, 0, start_us, end_us, device_type=DeviceType.CUDA, is_user_annotation=named
        )

    found = gpu_profile.shares(
        [
            on_gpu("nvjet_sm90_tst", 0, 2000),
            on_gpu("Optimizer.step#AdamW.step", 3000, 10_000, named=True),
            on_gpu("multi_tensor_apply_kernel<FusedAdamMathFunctor>", 3000, 4000),
            on_gpu("multi_tensor_apply_kernel<FusedAdamMathFunctor>", 9000, 10_000),
        ],
        on_gpu=True,
    )
    assert found["ms by kind"] == {"matrix products": 2.0, "optimizer": 2.0}
    assert found["share of time between kernels"] == pytest.approx(0.6)


class NoMask(Plain):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        return super().forward(q, k, v, False)


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize(("ranks", "per_rank"), [(8, 1), (4, 2)])
def test_the_check_of_causal_rings_passes_the_kernel_here_and_finds_a_wrong_mask(
    ranks: int, per_rank: int
) -> None:
    import gpu_smoke

    apart = gpu_smoke.ring_differences("cpu", ranks, per_rank)
    assert max(apart.values()) < gpu_smoke.MOST_ROUNDING / 4
    wrong = gpu_smoke.ring_differences("cpu", ranks, per_rank, NoMask())
    assert wrong["out"] > 5 * gpu_smoke.MOST_ROUNDING


@pytest.mark.usefixtures("beside")
def test_what_only_gpus_run_is_tried_first_and_what_compiles_last() -> None:
    import gpu_list

    names = [" ".join(case) for case in gpu_list.smoke_cases()]
    assert len(names) == len(set(names))
    assert [name.split()[0] for name in names[:3]] == [*gpu_list.RISKY]
    compiling = [i for i, n in enumerate(names) if "compile_" in n or "compiled=true" in n]
    assert min(compiling) == len(names) - len(gpu_list.COMPILED)
    tried = {choice for case in gpu_list.smoke_cases() for choice in case}
    assert {*gpu_list.choices()} <= tried


@pytest.mark.usefixtures("beside")
def test_peers_are_built_on_the_device_and_compiled_ones_come_before_eager_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vitsweep.extras.predict")
    import gpu_parts
    import gpu_steps
    import gpu_turns
    import peers

    built: list[torch.nn.Linear] = []
    monkeypatch.setattr(
        peers, "recipe", lambda _: lambda: built.append(torch.nn.Linear(2, 2)) or built[-1]
    )
    size = gpu_steps.Size("meta", "vit_tiny")
    gpu_turns.theirs("timm", size, 2, compiled="nothing", model_tflop=1.0).build()
    assert built[0].weight.is_meta
    found: list[list[str]] = []
    monkeypatch.setattr(peers, "available", lambda: (["timm"], []))
    monkeypatch.setattr(
        gpu_parts, "_measured", lambda groups, *_: found.extend([c.name for c in g] for g in groups)
    )
    earlier = {"rates": {"bfloat16": 1.0}, "images": 4}
    gpu_parts.beside_peers(gpu_steps.Run(gpu_steps.SMOKE, tmp_path / "peers.json", 0.0, earlier))
    first, last = found
    assert first[:2] == ["vitsweep's best stack", "vitsweep's best stack in FP8"]
    assert first.index("timm with compiled blocks") < first.index("vitsweep eager")
    assert first.index("vitsweep eager") < first.index("timm")
    assert last == ["vitsweep compile_model", "timm compiled"]


@pytest.mark.usefixtures("beside")
def test_a_turn_frees_caches_before_it_asks_for_room_and_tells_the_state_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import gpu_steps
    import gpu_turns

    calls: list[str] = []
    state = DeviceState(sm_clock_mhz=1500.0, power_capped_share=1.0, throttled=False)
    known = {
        "_allocated_gib": lambda _: 0.0,
        "reset_peak": lambda _: None,
        "peak_memory": lambda _: {"peak_allocated_gib": 3.0},
        "seconds_of": lambda *_: calls.append("time") or 0.1,
        "release": lambda _: calls.append("release"),
        "_free_share": lambda: calls.append("room") or 0.9,
        "DeviceMonitor": lambda _: SimpleNamespace(end=lambda _: state),
    }
    for name, value in known.items():
        monkeypatch.setattr(gpu_turns, name, value)
    contender, kept = gpu_turns.Contender("one", lambda: calls.append, 4, 1.0), {}
    gpu_turns._measure(contender, gpu_steps.Size("cuda"), kept)
    assert calls == ["release", "time", "release", "room"]
    assert [*kept] == ["one"]
    row = contender.row({"bfloat16": 700.0})
    assert (row["sm_clock_mhz"], row["power_capped_share"], row["throttled"]) == (
        1500.0,
        1.0,
        False,
    )


@pytest.mark.usefixtures("beside")
def test_a_row_is_divided_by_what_its_own_products_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """In FP8 some products stay in bfloat16."""
    import gpu_list
    import gpu_steps
    import gpu_turns

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    rates, size = (
        {"float32": 50.0, "tf32": 400.0, "bfloat16": 700.0, "float8": 1300.0},
        gpu_steps.Size("cuda"),
    )
    reached = {}
    for name in (*gpu_list.STACKS.values(), ("precision=fp32",), ("precision=tf32",)):
        contender = gpu_turns.ours("one", size, *name, images=64)
        contender.step_ms = [100.0]
        row = contender.row(rates)
        reached[name] = row["tflops"] / row["share_of_sustained"]
    *stacks, fp8, fp32, tf32 = reached.values()
    assert stacks == pytest.approx([700.0])
    assert 900 < fp8 < 1300
    assert (fp32, tf32) == pytest.approx((50.0, 400.0))


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("most", [512, 384, 256, 64])
def test_the_batch_is_the_largest_that_fits(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_steps

    monkeypatch.setattr(gpu_steps, "_fits", lambda *_, images: images <= most)
    assert gpu_steps.largest_batch(gpu_steps.Size("cuda")) == most


@pytest.mark.usefixtures("beside")
def test_attention_is_timed_on_the_models_batch_with_its_strides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("vitsweep.extras.predict")
    import gpu_parts
    import gpu_steps

    seen: list[Tensor] = []

    def keep(work: Callable[[], None], size: Any) -> float:
        cells = zip(work.__code__.co_freevars, work.__closure__ or (), strict=True)
        seen.append({name: cell.cell_contents for name, cell in cells}["q"])
        return 1.0

    monkeypatch.setattr(gpu_steps, "seconds_of", keep)
    monkeypatch.setattr(gpu_parts, "KERNEL_TOKENS", 2**10)
    size = gpu_steps.Size("cpu", "vit_tiny", 32, ("model.depth=2",), 0.1)
    found = gpu_parts._kernel(size, "sdpa_auto", 197)
    assert found["batch"] == 2**10 // 197 == len(seen[0])
    assert seen[0].stride() == (197 * 3 * 16 * 64, 64, 3 * 16 * 64, 1)


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_benchmark_names_torchs_build_and_leaves_no_old_figures(
    tmp_path: Path,
) -> None:
    old = tmp_path / "figures.json"
    old.write_text("{}")
    command = [sys.executable, BENCHMARKS / "gpu.py", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"torch {torch.__version__}, " in done.stdout
    assert "sees no GPU: " in done.stdout
    assert not old.exists()


BARE = ("torch", "numpy", "pandas", "pyarrow", "rich", "scipy", "matplotlib", "transformers")
"""What the machine with the GPU has, beside timm and torchvision (which has no build for CPUs)."""
ABSENT = ("hydra-core", "omegaconf", "antlr4-python3-runtime", "pydantic", "pydantic_core",
          "annotated-types", "typing-inspection", "submitit", "wandb")  # fmt: skip
"""What it lacks; some of it comes with transformers elsewhere."""


def bare_python(folder: Path) -> tuple[Path, Path]:
    """Make an environment that has only `BARE` and timm; return its Python and what is added to its path."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python, root = folder / "venv" / "bin" / "python", BENCHMARKS.parent
    pip = (python, "-m", "pip")
    subprocess.run([*pip, "install", "-q", "-c", root / "constraints.txt", *BARE], check=True)
    subprocess.run([*pip, "install", "-q", "--no-deps", "timm"], check=True)
    subprocess.run([*pip, "uninstall", "-q", "-y", *ABSENT], check=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    subprocess.run(
        ["sh", BENCHMARKS / "gpu_wheels.sh", folder / "packages", version],
        env=os.environ | {"PYTHON": str(python)},
        check=True,
    )
    return python, folder / "packages"


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_all_that_one_gpu_is_asked_runs_in_a_bare_environment(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    python, packages = bare_python(tmp_path_factory.mktemp("bare"))
    parts = ",".join([*FIRST, *LATER])
    done = subprocess.run(
        [python, BENCHMARKS / "gpu.py", "--smoke", "--parts", parts, "--out", tmp_path],
        env=os.environ | {"PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir()} == RESULTS
    found = json.loads((tmp_path / "figures.json").read_text())
    assert [row["status"] for row in found["product"]["rows"]] == ["measured", "measured"]
    with tarfile.open(tmp_path / "records.tar.gz") as tar:
        names = tar.getnames()
    assert len([n for n in names if n.startswith("results/product/") and "/runs/" in n]) == 2
    for choice, result in found["smoke"]["steps"].items():
        assert result == "pass" or result.startswith("refused: `"), (choice, result)
    for part in ("peers", "one_at_a_time"):
        rows = found[part]["rows"]
        measured = [row["name"] for row in rows if row.get("step_ms", 0) > 0]
        assert {"vitsweep eager"} <= set(measured) or {"base", "precision=O2"} <= set(measured)
        assert all(row["reason"].startswith("refused: `") for row in rows if "step_ms" not in row)
    assert "ms by kind" in found["profile"]["cells"]["eager"]
    assert found["soak"]["rows"][0]["step_ms"] > 0
    assert found["prediction"]["summary"]["cells"] >= 5
    for row in found["prediction"]["rows"]:
        assert {"predicted_ms", "measured_ms"} <= row.keys() or row["reason"], row


@pytest.mark.full
@pytest.mark.parametrize("done", [1, 2, 3])
def test_what_is_cut_after_any_part_leaves_a_report_of_the_parts_before(
    tmp_path: Path, done: int
) -> None:
    names = ["attention", "soak", "profile", "prediction"]
    command = [sys.executable, BENCHMARKS / "gpu.py", "--smoke", "--parts", ",".join(names)]
    with subprocess.Popen(
        [*command, "--out", tmp_path], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout
        finished = (line for line in process.stdout if line.endswith("done\n"))
        for _ in range(done):
            next(finished)
        report, kept = tmp_path / "report.md", tmp_path / "figures.json"
        deadline = time.monotonic() + 60
        while not kept.exists() or names[done - 1] not in json.loads(kept.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    assert {*json.loads(kept.read_text())} >= {"environment", *names[:done]}
    assert report.read_text().count("No figures.") <= len(names) - done
    assert {path.name.removeprefix(".") for path in tmp_path.iterdir()} == RESULTS


@pytest.mark.full
def test_what_is_cut_within_a_part_leaves_the_rows_that_it_had(tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARKS / "gpu.py", "--smoke", "--parts", "one_at_a_time"]
    kept, rows = tmp_path / "figures.json", []
    with subprocess.Popen([*command, "--out", tmp_path], start_new_session=True) as process:
        while not rows and process.poll() is None:
            time.sleep(0.1)
            figures = json.loads(kept.read_text()) if kept.exists() else {}
            rows = [r for r in figures.get("one_at_a_time", {}).get("rows", []) if r.get("step_ms")]
        os.killpg(process.pid, signal.SIGTERM)
    assert process.returncode == 143
    assert f"| {rows[0]['name']} | 16 |" in (tmp_path / "report.md").read_text()
