"""Another user of this machine, who looks at sweeps that are not hers."""

import os
import pwd
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.command import ROOT

NAME = "nobody"


@dataclass(frozen=True)
class OtherUser:
    """A user who can run vitsweep here.

    Attributes:
        name: as the system knows it.
    """

    name: str

    @classmethod
    def found(cls) -> "OtherUser | None":
        """Return one, or None: only root can become another user, who must reach this Python."""
        user = cls(NAME)
        if os.getuid() != 0 or NAME not in {entry.pw_name for entry in pwd.getpwall()}:
            return None
        try:
            return user if user._run("-c", "import vitsweep.cli.main").returncode == 0 else None
        except OSError:
            return None

    def vitsweep(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Type a command, with the Slurm of this process."""
        return self._run("-m", "vitsweep", *arguments)

    def files_in(self, folder: Path) -> list[str]:
        """Return what belongs to this user."""
        uid = pwd.getpwnam(self.name).pw_uid
        return [str(path) for path in folder.rglob("*") if path.lstat().st_uid == uid]

    def _run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        entry = pwd.getpwnam(self.name)
        return subprocess.run(
            [sys.executable, *arguments],
            cwd="/",
            env=os.environ | {"PYTHONPATH": str(ROOT), "HOME": "/nonexistent", "COLUMNS": "200"},
            user=entry.pw_uid,
            group=entry.pw_gid,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=300,
        )
