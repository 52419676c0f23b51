"""Path of the configuration folder: inside an installed package, beside it in a checkout."""

from pathlib import Path


def conf_dir() -> Path:
    """Return the folder of `config.yaml` and the config groups.

    Raises:
        FileNotFoundError: the installation is damaged.
    """
    package = Path(__file__).parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(
        f"vitsweep's conf/ is neither in {package} nor beside it: install it again."
    )


def named_sweeps() -> list[str]:
    """Return what `+sweep=NAME` may name."""
    return sorted(path.stem for path in (conf_dir() / "sweep").glob("*.yaml"))
