"""The script's output, as the probe arranges it."""

from __future__ import annotations

import io
import os

import pytest

from fp8console.probe.install import _FullDiskIsNoError


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_does_not_end_a_print() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="No space"):
            os.write(fd, b"x")
        stream = io.TextIOWrapper(io.BufferedWriter(_FullDiskIsNoError(fd, "wb", closefd=False)), line_buffering=True)
        print("a line that is lost", file=stream)
        stream.flush()
    finally:
        os.close(fd)


def test_other_errors_are_the_scripts_to_see() -> None:
    read, write = os.pipe()
    os.close(read)
    stream = io.TextIOWrapper(io.BufferedWriter(_FullDiskIsNoError(write, "wb", closefd=False)), line_buffering=True)
    with pytest.raises(BrokenPipeError):
        print("nobody reads", file=stream)
    os.close(write)
