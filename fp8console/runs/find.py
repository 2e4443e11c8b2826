"""Finding the runs there are, by folder and by word. Standard library only, so that ``ctl`` starts fast."""

from __future__ import annotations

import json
import os
from pathlib import Path

from fp8console.protocol import paths

NEWEST = "newest"


class RunNotFound(LookupError):
    """No run, or more than one, goes by that word; its text is one line."""


def default_roots() -> list[Path]:
    """The folders that runs go to by default, the usual one first."""
    return [paths.state_root(), paths.fallback_root()]


def _created(run_dir: Path) -> float:
    try:
        created = json.loads((run_dir / paths.RUN).read_bytes())["created"]
        return float(created)
    except (OSError, ValueError, TypeError, KeyError):
        try:
            return run_dir.stat().st_mtime
        except OSError:
            return 0.0


def find_runs(root: Path | None = None) -> list[Path]:
    """The run directories in ``root`` (the default folders when None), newest first. A link to one counts too."""
    found: dict[str, tuple[float, str, Path]] = {}
    for folder in [Path(root)] if root is not None else default_roots():
        try:
            entries = sorted(os.listdir(folder))
        except OSError:
            continue
        for name in entries:
            run_dir = folder / name
            if (run_dir / paths.RUN).is_file():
                found.setdefault(os.path.realpath(run_dir), (_created(run_dir), name, run_dir))
    return [run_dir for *_, run_dir in sorted(found.values(), reverse=True)]


def _listing(runs: list[Path]) -> str:
    names = ", ".join(run_dir.name for run_dir in runs[:5])
    return names + (f" and {len(runs) - 5} more" if len(runs) > 5 else "")


def resolve(word: str | None, root: Path | None = None) -> Path:
    """The run directory that ``word`` names: an id, a unique part of one, a path, or the newest ("newest" or
    None).

    Raises RunNotFound, one line that says which runs there are.
    """
    where = str(root) if root is not None else str(paths.state_root())
    if word is not None:
        path = Path(word).expanduser()
        if (path / paths.RUN).is_file():
            return path
        if os.sep in word or word in (os.curdir, os.pardir):
            raise RunNotFound(f"no run at {word}: no {paths.RUN} there")
    runs = find_runs(root)
    if not runs:
        raise RunNotFound(f"no runs in {where}")
    if not word:
        return runs[0]
    exact = [run_dir for run_dir in runs if run_dir.name == word]
    if not exact and word == NEWEST:
        return runs[0]
    part = exact[:1] or [run_dir for run_dir in runs if word in run_dir.name]
    if len(part) == 1:
        return part[0]
    if part:
        raise RunNotFound(f"{word!r} fits {len(part)} runs: {_listing(part)}")
    raise RunNotFound(f"no run {word!r} in {where}; there are: {_listing(runs)}")
