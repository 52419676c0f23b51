"""`pip install .` gives a working command anywhere, with its menu inside."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def built_wheel(tmp_path: Path) -> Path:
    folder = tmp_path / "wheel"
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "-w",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(build, check=True, timeout=300)
    return next(folder.glob("vitsweep-*.whl"))


@pytest.mark.slow
def test_the_wheel_carries_the_package_and_a_cell_runs_from_it_outside_the_checkout(
    tmp_path: Path,
) -> None:
    """The package, its menu and the plugin, and nothing else."""
    wheel = built_wheel(tmp_path)
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}

    assert tops == {"vitsweep", "hydra_plugins"}
    assert "hydra_plugins/__init__.py" not in names
    conf = {str(p.relative_to(ROOT / "conf")) for p in (ROOT / "conf").rglob("*.yaml")}
    assert {
        n.removeprefix("vitsweep/conf/") for n in names if n.startswith("vitsweep/conf/")
    } >= conf
    assert {"vitsweep/py.typed", "vitsweep/extras/published/published.csv"} <= set(names)
    assert_a_cell_runs_from(wheel, tmp_path)


def test_the_source_distribution_takes_nothing_from_folders_of_the_same_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    include = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert all(pattern.startswith("/") and (ROOT / pattern[1:]).exists() for pattern in include)
    readme = ROOT / project["project"]["readme"]
    assert f"/{readme.name}" in include
    links = re.findall(r"\]\(([^)]+)\)", readme.read_text())
    assert all(link.startswith("https://") for link in links), "an index page has no folder"


def assert_a_cell_runs_from(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(install, check=True, timeout=300)
    here = tmp_path / "elsewhere"
    here.mkdir()

    done = subprocess.run(
        [sys.executable, "-m", "vitsweep", "measurement=smoke", "model.depth=1", "sweep.baseline=null"],
        cwd=here, env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert (here / "results" / "vit_nano" / "report" / "index.html").exists()
