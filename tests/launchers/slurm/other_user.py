"""Another user of this machine, who looks at sweeps that are not hers."""

import os
import pwd
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tests.command import ROOT

NAME = "nobody"
PYTHONS = (sys.executable, "/usr/bin/python3")
"""Ours may be in a home that others cannot enter; the system's imports the same packages."""


@dataclass(frozen=True)
class OtherUser:
    """A user who can run vitsweep here.

    Attributes:
        name: as the system knows it.
        python: that this user can run.
    """

    name: str
    python: str

    @classmethod
    def found(cls) -> "OtherUser | None":
        """Return one, or None: only root can become another user, who must reach a Python."""
        if os.getuid() != 0 or NAME not in {entry.pw_name for entry in pwd.getpwall()}:
            return None
        users = (cls(NAME, python) for python in PYTHONS)
        return next((user for user in users if user._can_import()), None)

    def vitsweep(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Type a command, with the Slurm of this process."""
        return self._run("-m", "vitsweep", *arguments)

    def files_in(self, folder: Path) -> list[str]:
        """Return what belongs to this user."""
        uid = pwd.getpwnam(self.name).pw_uid
        return [str(path) for path in folder.rglob("*") if path.lstat().st_uid == uid]

    def _can_import(self) -> bool:
        try:
            return self._run("-c", "import vitsweep.cli.main, hydra, pandas").returncode == 0
        except OSError:
            return False

    def _run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        entry = pwd.getpwnam(self.name)
        path = os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])
        return subprocess.run(
            [self.python, *arguments],
            cwd="/",
            env=os.environ | {"PYTHONPATH": path, "HOME": "/nonexistent", "COLUMNS": "200"},
            user=entry.pw_uid,
            group=entry.pw_gid,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=300,
        )
