"""`vitsweep doctor`: what this machine can do, what is missing, and how to get it."""

import os
import shutil
import socket
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import psutil
from rich.console import RenderableType

from vitsweep import extras
from vitsweep.cli import VERBS, Options, print_json
from vitsweep.console import captured, open_console, print_lines
from vitsweep.errors import ExitCode
from vitsweep.rates.profile import cpu_half_precision, device_name
from vitsweep.results.sweeps import RESULTS, find_sweep, sweep_names
from vitsweep.spec.resources import Machine
from vitsweep.tables.render import TextTable
from vitsweep.tables.sweep_tables import SweepTables

PACKAGES = ("torch", "hydra-core", "submitit", "hydra-submitit-launcher", "pandas", "wandb")
SLURM = ("sinfo", "sbatch", "squeue")


def add_options(options: Options) -> None:
    """Add what may follow the verb."""
    options.add_json()


def run(arguments: Sequence[str]) -> int:
    """Print the findings; return 0 where vitsweep can run here, else 3."""
    console, typed = open_console(), VERBS["doctor"].read(arguments)
    machine = Machine.here()
    found = {
        "Machine": _machine(machine),
        "Software": _software(),
        "Cluster": _cluster(),
    }
    for title, rows in found.items():
        console.print(_table(title, rows))
    if "doctor" in extras.OPTIONS and sweep_names():
        console.print(extras.option("doctor")(SweepTables.of(find_sweep(None))))
    problems = _unwritable_results()
    print_lines(console, problems)
    if typed.json:
        keys = ("machine", "software", "cluster")
        print_json(**dict(zip(keys, map(dict, found.values()), strict=True)), problems=problems)
    return ExitCode.not_all_measured if problems else ExitCode.ok


def _unwritable_results() -> list[str]:
    folder = next(path for path in (RESULTS, Path.cwd()) if path.is_dir())
    if os.access(folder, os.W_OK):
        return []
    return [
        f"`{folder.absolute()}` cannot be written: choose another folder, or `sweep.folder=DIR`."
    ]


def _machine(machine: Machine) -> list[tuple[str, str]]:

    memory, disk = psutil.virtual_memory(), shutil.disk_usage(Path.cwd())
    half = cpu_half_precision()
    slow = "no bfloat16 instructions: O1 to O3 and bf16 will be slower than fp32 here"
    return [
        ("host", socket.gethostname()),
        ("processor", f"{device_name('cpu')}, {machine.cores_per_node} cores usable"),
        ("half precision on CPU", slow if half == "none" else half),
        ("memory", f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"),
        ("GPUs", _gpus(machine)),
        ("results would go to", f"{Path('results').absolute()}, {disk.free / 2**30:.0f} GiB free"),
        ("load", f"{os.getloadavg()[0]:.1f} (timing wants an idle machine)"),
    ]


def _gpus(machine: Machine) -> str:
    if not machine.devices_per_node:
        return "none usable: cells run on CPU ranks over gloo"
    import torch

    names = {torch.cuda.get_device_name(i) for i in range(machine.devices_per_node)}
    return f"{machine.devices_per_node} x {', '.join(sorted(names))}"


def _software() -> list[tuple[str, str]]:
    compiler = next((c for c in ("g++", "clang++", "c++") if shutil.which(c)), None)
    named = compiler or "absent (compilation=compile_*: apt install g++)"
    return [*((name, version(name)) for name in PACKAGES), ("C++ compiler", named)]


def _cluster() -> list[tuple[str, str]]:
    missing = [name for name in SLURM if not shutil.which(name)]
    if "sinfo" in missing:
        return [("Slurm", "no client here: sweeps run on this machine (hydra/launcher=local)")]
    shown = captured(["sinfo", "-h", "-o", "%P %D nodes, %c cpus, %G"], timeout=20)
    trouble = shown.stderr.strip().splitlines()[:1]
    answer = shown.stdout.strip() or f"installed, but no cluster answers: {' '.join(trouble)}"
    return [("Slurm", answer), ("missing commands", ", ".join(missing) or "none")]


def _table(title: str, rows: list[tuple[str, str]]) -> RenderableType:
    from pandas import DataFrame

    return TextTable(DataFrame(rows, dtype=str), title, show_header=False)
