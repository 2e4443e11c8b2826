"""Restore points on disk: ``checkpoints/step-<N>[-<tag>]/rank-<r>/`` with a manifest of digests.

A checkpoint is written aside, synced and renamed, by a thread of its own: the training thread only takes the copy in
memory. A folder that has its final name is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fp8console.probe.snapshots import Snapshot
from fp8console.protocol.numbers import dumps

STATE = "state.pt"
MANIFEST = "manifest.json"


#: Checkpoints that may wait for the disk at a time: each holds a copy of the whole state in memory.
MOST_PENDING = 3


class CheckpointError(RuntimeError):
    """A checkpoint that can't be read or is not what its manifest says."""


def folder_name(step: int, tag: str | None) -> str:
    return f"step-{step:09d}" + (f"-{tag}" if tag else "")


def parse_folder(name: str) -> tuple[int, str | None] | None:
    """(step, tag) of a checkpoint's folder, or None for any other name."""
    match = re.fullmatch(r"step-(\d{9,})(?:-(.+))?", name)
    return (int(match[1]), match[2]) if match else None


class CheckpointStore:
    """The checkpoints of one rank. ``save`` returns at once; ``on_event`` tells how it went, from the writer thread."""

    def __init__(self, root: Path, rank: int, keep: int, on_event: Callable[[str, dict[str, Any]], None]) -> None:
        self._root = root
        self._rank = rank
        self._keep = keep
        self._on_event = on_event  # ("saved" | "failed" | "dropped", details)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._abandoned = False
        self._tidied = False

    def save(self, snapshot: Snapshot, tag: str | None, done: Callable[[dict[str, Any]], None]) -> None:
        """Write ``snapshot``; ``done`` gets {"ok", "path", "digest", "reason"} when it is on disk or failed."""
        holder = object()
        snapshot.holders.add(holder)
        # A daemon: a disk that hangs must not keep the interpreter from ending; close() waits a while for it.
        thread = threading.Thread(
            target=self._write, args=(snapshot, tag, done, holder), name="fp8console-checkpoint", daemon=True
        )
        self._threads = [thread for thread in self._threads if thread.is_alive()] + [thread]
        thread.start()

    @property
    def pending(self) -> int:
        """Checkpoints that are not yet on disk."""
        return sum(thread.is_alive() for thread in self._threads)

    def wait(self, seconds: float | None = None) -> None:
        """Until everything that was asked for is written, or the time is over: what is unfinished is given up then.

        (A thread that is inside torch while the interpreter ends would abort the process.)
        """
        end = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
        if self.pending:
            self._abandoned = True
            for thread in self._threads:
                thread.join(1.0)

    def _write(
        self, snapshot: Snapshot, tag: str | None, done: Callable[[dict[str, Any]], None], holder: object
    ) -> None:
        with self._lock:
            try:
                self._tidy()
                result = self._write_aside(snapshot, tag)
            except Exception as error:
                reason = _reason(error)
                result = {"ok": False, "reason": f"the checkpoint could not be written: {reason}"}
                self._on_event("failed", {"step": snapshot.step, "reason": reason})
            finally:
                snapshot.holders.discard(holder)
            try:
                if result["ok"]:
                    self._on_event("saved", {**snapshot.about, **result, "tag": tag})
                    self._prune()
            except OSError as error:
                self._on_event("failed", {"step": snapshot.step, "reason": f"older ones stay: {_reason(error)}"})
        done(result)

    def _tidy(self) -> None:
        """Once: remove what killed processes of this rank had not finished, writing or removing."""
        if self._tidied:
            return
        self._tidied = True
        for left in self._root.glob(f"step-*/.rank-{self._rank}.*"):
            shutil.rmtree(left, ignore_errors=True)

    def _check_wanted(self) -> None:
        if self._abandoned:
            raise OSError("given up, the process ends")

    def _write_aside(self, snapshot: Snapshot, tag: str | None) -> dict[str, Any]:
        started = time.perf_counter()
        value = snapshot.compute_digest(lambda: self._abandoned)
        final = self._root / folder_name(snapshot.step, tag) / f"rank-{self._rank}"
        aside = final.parent / f".rank-{self._rank}.{os.getpid()}.tmp"
        final.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(mode=0o700)
        try:
            with open(aside / STATE, "wb") as file:
                checked: Any = _Checked(file, self._check_wanted)
                torch.save(_content(snapshot), checked)
                file.flush()
                os.fsync(file.fileno())
            manifest = {
                "version": 1,
                "step": snapshot.step,
                "tag": tag,
                "rank": self._rank,
                "point": snapshot.about,
                "digest": value,
                "torch": torch.__version__,
                "files": {STATE: {"sha256": _sha256(aside / STATE), "bytes": os.path.getsize(aside / STATE)}},
            }
            with open(aside / MANIFEST, "w") as text:
                text.write(dumps(manifest, indent=1) + "\n")
                text.flush()
                os.fsync(text.fileno())
            _sync_folder(aside)
            self._check_wanted()
            _remove(final)
            os.rename(aside, final)
            _sync_folder(final.parent)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        size = os.path.getsize(final / STATE)
        seconds = time.perf_counter() - started
        return {"ok": True, "path": str(final), "digest": value, "bytes": size, "seconds": seconds, "reason": None}

    def _prune(self) -> None:
        """Remove this rank's untagged checkpoints but the newest ``keep``; tagged ones stay for ever.

        When none of those is sound (the training has diverged), the newest sound one before them stays as well.
        """
        found = sorted(step for step, tag in self.complete() if tag is None)
        old, kept = found[: -self._keep], found[-self._keep :]
        if not any(self._is_sound(step) for step in kept):
            good = next((step for step in reversed(old) if self._is_sound(step)), None)
            old = [step for step in old if step != good]
        for step in old:
            folder = self._root / folder_name(step, None)
            _remove(folder / f"rank-{self._rank}")
            try:
                folder.rmdir()
            except OSError:
                pass  # another rank's is still there
            self._on_event("dropped", {"step": step, "reason": f"only the newest {self._keep} untagged ones are kept"})

    def _is_sound(self, step: int) -> bool:
        """Whether the checkpoint was taken in a sound stretch; a manifest that does not say so counts as yes."""
        try:
            manifest = json.loads((self._root / folder_name(step, None) / f"rank-{self._rank}" / MANIFEST).read_text())
            return bool(manifest["point"].get("healthy", True))
        except (OSError, ValueError, KeyError, AttributeError):
            return True

    def complete(self) -> list[tuple[int, str | None]]:
        """(step, tag) of the complete checkpoints of this rank."""
        if not self._root.is_dir():
            return []
        parsed = [(parse_folder(entry.name), entry) for entry in self._root.iterdir()]
        return [about for about, entry in parsed if about and (entry / f"rank-{self._rank}" / MANIFEST).is_file()]

    def load(self, step: int) -> tuple[dict[str, Any], list[torch.Tensor], dict[str, Any]]:
        """(tree, tensors, manifest) of a checkpoint whose files' digests were found right. Raises CheckpointError."""
        tags = [tag for found, tag in self.complete() if found == step]
        if not tags:
            raise CheckpointError(f"no checkpoint of step {step:,} on disk")
        for tag in tags[:-1]:
            try:
                return self._load(self._root / folder_name(step, tag) / f"rank-{self._rank}")
            except CheckpointError:
                continue  # the same state lies there under another tag
        return self._load(self._root / folder_name(step, tags[-1]) / f"rank-{self._rank}")

    def _load(self, folder: Path) -> tuple[dict[str, Any], list[torch.Tensor], dict[str, Any]]:
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            wanted = manifest["files"][STATE]["sha256"]
            manifest["digest"], manifest["point"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder / MANIFEST} can't be read: {_reason(error)}") from None
        try:
            found = _sha256(folder / STATE)
        except OSError as error:
            raise CheckpointError(f"{folder / STATE} can't be read: {_reason(error)}") from None
        if found != wanted:
            raise CheckpointError(
                f"{folder / STATE} is damaged: its SHA-256 is not the manifest's; choose another point"
            )
        # The tree goes beyond what weights_only admits (schedulers hold what they like), so it is unpickled by itself:
        # the file is this user's own, in a folder only they can write, and was verified a line above.
        try:
            loaded = torch.load(folder / STATE, map_location="cpu", weights_only=True)
            return pickle.loads(bytes(loaded["tree"].tolist())), loaded["tensors"], manifest
        except Exception as error:
            raise CheckpointError(f"{folder / STATE} can't be loaded: {_reason(error)}") from None


def _content(snapshot: Snapshot) -> dict[str, Any]:
    """What goes into the file: ``modules`` for anybody with torch, ``tree`` and ``tensors`` for a rollback.

    ``modules`` are the state dicts of the training's root modules; their tensors are those of ``tensors``, stored once.
    The tree is pickled into bytes of its own, so that torch.load(..., weights_only=True) takes the file anywhere.
    """
    modules = [
        {name: snapshot.host[slot.index] for name, slot in saved.items()}
        for saved in snapshot.tree["modules"]
        if saved is not None
    ]
    tree = torch.frombuffer(bytearray(pickle.dumps(snapshot.tree)), dtype=torch.uint8)
    return {"modules": modules, "tree": tree, "tensors": snapshot.host}


class _Checked:
    """A file for torch.save that asks before each write whether it is still wanted."""

    def __init__(self, file: Any, check: Callable[[], None]) -> None:
        self._file = file
        self._check = check

    def write(self, data: Any) -> int:
        self._check()
        return int(self._file.write(data))

    def flush(self) -> None:
        self._file.flush()


def _reason(error: BaseException) -> str:
    """What went wrong, in words: torch hides a full disk behind a complaint of its own about positions."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {error}"


def _remove(folder: Path) -> None:
    """Remove a finished checkpoint; it loses its final name first, so that a kill in between leaves no half of one."""
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    try:
        os.rename(folder, aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside, ignore_errors=True)


def _sha256(path: Path) -> str:
    hasher = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            hasher.update(chunk)
    return hasher.hexdigest()


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
