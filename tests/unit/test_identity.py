"""A process is told from any other, also from one that got its pid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from fp8console.protocol.identity import ProcessIdentity, identify, is_alive, send_signal

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_this_process_is_alive_and_comes_back_from_json() -> None:
    me = identify(os.getpid())
    assert is_alive(me)
    assert ProcessIdentity.from_json(me.to_json()) == me


@pytest.mark.parametrize("data", [None, [], {}, {"pid": "7"}, {"pid": None}])
def test_what_is_no_identity_is_none(data: object) -> None:
    assert ProcessIdentity.from_json(data) is None


def test_the_same_pid_with_another_start_or_boot_is_another_process() -> None:
    me = identify(os.getpid())
    if me.start is not None:
        assert not is_alive(replace(me, start=me.start + 1))
        assert not send_signal(replace(me, start=me.start + 1), signal.SIGKILL)
    if me.boot is not None:
        assert not is_alive(replace(me, boot="another boot"))


def test_a_dead_process_and_a_zombie_are_not_alive() -> None:
    child = subprocess.Popen(SLEEP)
    who = identify(child.pid)
    assert is_alive(who)
    assert send_signal(who, signal.SIGTERM)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(who), "a zombie"
    child.wait()
    assert not is_alive(who)
    assert not send_signal(who, signal.SIGTERM)


def test_a_signal_reaches_the_group() -> None:
    child = subprocess.Popen(SLEEP, start_new_session=True)
    assert send_signal(identify(child.pid), signal.SIGKILL, group=True)
    assert child.wait() == -signal.SIGKILL


def test_a_process_name_with_brackets_does_not_confuse(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "a) Z 1 (b")
    os.symlink(sys.executable, path)
    child = subprocess.Popen([path, *SLEEP[1:]])
    try:
        assert is_alive(identify(child.pid))
    finally:
        child.kill()
        child.wait()
