"""Files that say so when they are imported, under names that Python looks for where one stands."""

from pathlib import Path

MODULES = (
    "sitecustomize",
    "usercustomize",
    "types",
    "json",
    "runpy",
    "torch",
    "pynvml",
    "flash_attn",
)
PACKAGES = ("multiprocessing", "hydra")
PLANTED = "planted-entity"
"""Whose runs W&B would write, if it read its settings in the current folder."""


def plant(folder: Path) -> Path:
    """Fill a folder; return the file that an import of any of it makes."""
    sung = folder / "canary"
    song = f"open({str(sung)!r}, 'a').write(__file__ + '\\n')\n"
    for name in (*MODULES, *(f"{package}/__init__" for package in PACKAGES)):
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(song)
    (folder / "wandb").mkdir()
    (folder / "wandb" / "settings").write_text(f"[default]\nentity = {PLANTED}\n")
    return sung
