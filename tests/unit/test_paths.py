"""Where things are, in places that are longer than usual."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest

from fp8console.protocol import paths


@pytest.mark.parametrize("length", [1, 60, 73, 74, 200])
def test_a_socket_can_be_made_however_long_the_temporary_folders_name_is(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = "/" + "x" * length
    monkeypatch.setattr(tempfile, "gettempdir", lambda: folder)
    chosen = paths.socket_path(tmp_path)
    assert chosen == paths.socket_path(tmp_path), "the console looks for it where the supervisor has put it"
    assert len(str(chosen)) <= 100
    assert str(chosen).startswith(folder) == (len(f"{folder}/{chosen.relative_to(chosen.parents[2])}") <= 100)
    # The system takes a path of that length: it is the folder that is missing, or not.
    with socket.socket(socket.AF_UNIX) as made:
        try:
            made.bind(str(chosen.with_name("x" * len(chosen.name))))
        except OSError as error:
            assert "too long" not in str(error)
        else:
            chosen.with_name("x" * len(chosen.name)).unlink()
