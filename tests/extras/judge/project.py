"""A small project with a training loop, as somebody else might have it in a git repository."""

import subprocess
from pathlib import Path

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, inputs, classes, width=64):
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.hidden = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.first(x.flatten(1))
        for layer in self.hidden:
            x = x + torch.relu(layer(x))
        return self.head(x)
"""

TRAIN = """
import torch
from torch.nn.functional import cross_entropy

from net.model import Net


def make_step(cell):
    model = Net(cell.in_channels * cell.resolution_px ** 2, cell.num_classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch):
        images, labels = batch
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step
"""

STEP = "train.py:make_step"
SETTINGS = ("data=digits", "resources.threads_per_rank=1", "batch.images_per_step=32")


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def git(root: Path, *words: str) -> str:
    identity = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
    done = subprocess.run(
        ["git", *identity, *words], cwd=root, capture_output=True, encoding="utf-8", check=True
    )
    return done.stdout


def files() -> dict[str, str]:
    return {"net/__init__.py": "", "net/model.py": MODEL, "train.py": TRAIN}


def commit(root: Path, message: str) -> str:
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--allow-empty", "--message", message)
    return git(root, "rev-parse", "HEAD").strip()


def repository(root: Path) -> Path:
    """Make a repository of one commit."""
    root.mkdir(parents=True, exist_ok=True)
    git(root, "init", "--quiet")
    write(root, files())
    commit(root, "A training loop")
    return root
