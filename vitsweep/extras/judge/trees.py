"""The two states of the code: git worktrees, the working tree, or folders as they are."""

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from vitsweep.errors import BadValueError, VitsweepError
from vitsweep.execution.code_hash import PACKAGE_FOLDER

SOURCE_ROOTS = ("", "src", "python", "lib")
"""Folders of a project that its packages may lie in."""
MOST_BYTES = 10 * 2**20
"""A larger file that git does not track is named and not copied."""
BASE, HEAD = "base", "head"
WORKING_TREE = "working tree"


@dataclass(frozen=True, kw_only=True)
class Tree:
    """One state of the code.

    Attributes:
        side: `base` or `head`.
        root: folder that holds it.
        label: what was typed, with the commit.
        source: repository that it was taken from; the folder itself where there is none.
        notes: what it lacks of its source.
    """

    side: str
    root: Path
    label: str
    source: Path
    notes: tuple[str, ...] = ()

    def files(self) -> dict[str, str]:
        """Return path -> hash of the content of each file."""
        return {name: _digest(self.root / name) for name in self.names()}

    def stamps(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Return path -> what `stat` says of each file that exists; `st_ctime_ns` cannot be set back."""
        found = dict[str, tuple[int, ...]]()
        for name in names:
            with suppress(OSError):
                is_now = (self.root / name).lstat()
                found[name] = (is_now.st_ino, is_now.st_size, is_now.st_ctime_ns)
        return found

    def names(self) -> list[str]:
        """Return the path of every file that git would track, or that is no cache."""
        listed = git(self.root, "ls-files", "-co", "--exclude-standard", "-z", check=False)
        names = [n for n in listed.split("\0") if n] or [
            str(path.relative_to(self.root))
            for path in self.root.rglob("*")
            if not {".git", "__pycache__"} & set(path.parts) and path.suffix != ".pyc"
        ]
        return [name for name in names if (self.root / name).is_file()]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def git(folder: Path, *words: str, check: bool = True) -> str:
    """Return what a command of git prints; "" where it fails and `check` is off.

    Raises:
        VitsweepError: git is missing, or the command failed.
    """
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, encoding="utf-8"
        )
    except OSError as error:
        raise VitsweepError(f"`git` cannot be started ({error.strerror}): install it.") from error
    if done.returncode and check:
        raise VitsweepError(f"`git {' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout if not done.returncode else ""


def states_of(base: str, head: str | None) -> tuple[Path | None, tuple[str, str]]:
    """Return the repository and two of its commits, "" for the working tree; None and two folders without.

    Raises:
        BadValueError: no such commit, or one folder and one commit.
        VitsweepError: this is no git repository, or the judge is a part of it.
    """
    folders = [Path(text).absolute() for text in (base, head) if text and Path(text).is_dir()]
    if len(folders) == 2:
        for root in folders:
            _refuse_own_judge(root)
        return None, (str(folders[0]), str(folders[1]))
    repository = repository_here()
    _refuse_own_judge(repository)
    return repository, (commit_of(repository, base), commit_of(repository, head) if head else "")


@contextmanager
def laid_out(base: str, head: str | None, place: Path) -> Iterator[tuple[Tree, Tree]]:
    """Lay out both states, and remove at the end what was laid out.

    Args:
        base: a commit, or a folder.
        head: the same, or None for the working tree.
        place: folder for the worktrees.

    Raises:
        VitsweepError: see `states_of`.
    """
    repository, found = states_of(base, head)
    if repository is None:
        base_tree, head_tree = (
            Tree(side=side, root=Path(root), label=str(text), source=Path(root))
            for side, root, text in zip((BASE, HEAD), found, (base, head), strict=True)
        )
        yield base_tree, head_tree
        return
    try:
        yield (
            _worktree(repository, place / BASE, BASE, found[0], base),
            _head(repository, place / HEAD, found[1], head),
        )
    finally:
        for side in (BASE, HEAD):
            git(repository, "worktree", "remove", "--force", str(place / side), check=False)
            shutil.rmtree(place / side, ignore_errors=True)
        git(repository, "worktree", "prune", check=False)


def repository_here() -> Path:
    """Return the root of the git repository that the working directory is in.

    Raises:
        VitsweepError: it is in none.
    """
    top = git(Path.cwd(), "rev-parse", "--show-toplevel", check=False).strip()
    if not top:
        raise VitsweepError(
            f"`{Path.cwd()}` is in no git repository: `cd` to the project whose commits you compare, or "
            "give two folders."
        )
    return Path(top)


def _refuse_own_judge(repository: Path) -> None:
    """Refuse a judge that the code under judgment could change."""
    folder = PACKAGE_FOLDER.resolve()
    if folder.is_relative_to(repository.resolve()) and "site-packages" not in folder.parts:
        raise VitsweepError(
            f"The judge is imported from `{folder}`, a part of what is judged: install a copy of its "
            "own (`python -m venv JUDGE && JUDGE/bin/pip install .`) and type `JUDGE/bin/vitsweep judge ...`."
        )


def commit_of(repository: Path, text: str) -> str:
    """Return the full id of a commit.

    Raises:
        BadValueError: the text names none.
    """
    found = git(
        repository, "rev-parse", "--verify", "--quiet", f"{text}^{{commit}}", check=False
    ).strip()
    if not found or text.startswith("-"):
        raise BadValueError(
            f"`{text}` is no commit of `{repository}`: `git log --oneline --all` lists them; a branch of the "
            "remote is `origin/NAME`. Two folders can be given instead."
        )
    return found


def _worktree(repository: Path, root: Path, side: str, commit: str, typed: str) -> Tree:
    git(repository, "worktree", "add", "--detach", "--force", str(root), commit)
    label = f"{typed} ({commit[:10]})" if not commit.startswith(typed) else commit[:10]
    return Tree(side=side, root=root, label=label, source=repository)


def _head(repository: Path, root: Path, commit: str, typed: str | None) -> Tree:
    if commit:
        return _worktree(repository, root, HEAD, commit, str(typed))
    # A commit of what is in the working tree, which no branch will know
    identity = ("-c", "user.name=vitsweep", "-c", "user.email=vitsweep@localhost")
    stash = git(repository, *identity, "stash", "create").strip() or commit_of(repository, "HEAD")
    _worktree(repository, root, HEAD, stash, WORKING_TREE)
    notes = tuple(_copy_untracked(repository, root))
    return Tree(side=HEAD, root=root, label=WORKING_TREE, source=repository, notes=notes)


def _copy_untracked(repository: Path, root: Path) -> Iterator[str]:
    results = root.parents[4]  # results/judge/judged/TIME/code/head
    if results == repository:
        results = root.parents[3]
    names = git(repository, "ls-files", "--others", "--exclude-standard", "-z").split("\0")
    for name in filter(None, names):
        source, target = repository / name, root / name
        if source.is_relative_to(results) or not source.is_file():
            continue
        if source.stat().st_size > MOST_BYTES:
            yield f"head: `{name}` is large and not tracked: `--link {name}` shows it to both sides"
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def prepare(tree: Tree, setup: str, links: Sequence[str], files: Sequence[str]) -> Tree:
    """Link data, bring a step file that the state lacks, and build it.

    Args:
        tree: the state.
        setup: shell command, started in its root; "" for none.
        links: paths of the source that the state is shown.
        files: paths relative to the root; taken from the source where the state has none.

    Returns:
        The state, with a note of each file that it lacked.

    Raises:
        VitsweepError: there is no such path, or the command failed.
    """
    for name in links:
        source, target = (tree.source / name).absolute(), tree.root / name
        if not source.exists():
            raise BadValueError(f"`--link {name}`: `{source}` does not exist.")
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(source, target)
    notes = list(tree.notes)
    for name in files:
        if (tree.root / name).exists():
            continue
        if not (tree.source / name).is_file():
            raise BadValueError(
                f"`{name}` is neither in `{tree.label}` nor in `{tree.source}`: give the path of the file "
                "from the root of the project."
            )
        (tree.root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(tree.source / name, tree.root / name)
        notes.append(f"{tree.side}: it has no `{name}`, so that of `{tree.source}` ran")
    if setup:
        done = subprocess.run(
            setup, shell=True, cwd=tree.root, capture_output=True, text=True, encoding="utf-8"
        )
        if done.returncode:
            last = "\n".join(["", *(done.stdout + done.stderr).splitlines()[-15:]])
            raise VitsweepError(
                f"`--setup {setup}` failed in `{tree.label}` with exit code {done.returncode}.{last}"
            )
    return replace(tree, notes=tuple(notes))


def require_function(option: str, file: str, name: str, tree: Tree) -> None:
    """Require that a file defines a function; the file is read and not run.

    Raises:
        BadValueError: it does not.
    """
    text = (tree.root / file).read_text(encoding="utf-8", errors="replace")
    if not re.search(rf"\b{name}\b|import \*|__getattr__|globals", text):
        raise BadValueError(
            f"`{option} {file}:{name}`: `{file}` of the {tree.side} ({tree.label}) has no `{name}`: give the "
            "name of a function in it."
        )
