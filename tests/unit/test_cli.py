"""The command line: what the first word means, what is refused and how, and what the commands print."""

from __future__ import annotations

import csv
import json
import math
import os
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8console.cli import demo
from fp8console.cli.main import COMMANDS, main
from fp8console.cli.options import LaunchOptions
from fp8console.protocol import events, paths, records, wire
from fp8console.protocol.identity import identify
from fp8console.protocol.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
FLAGS = records.FLAGS


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, a folder of runs and a configuration of this test's own."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(paths, "fallback_root", lambda: tmp_path / "none")
    for name in list(os.environ):
        if name.startswith("FP8CONSOLE_"):
            monkeypatch.delenv(name)
    return work


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], LaunchOptions]]:
    """What was launched, with a launch that starts nothing and returns 7."""
    calls: list[tuple[list[str], LaunchOptions]] = []

    def launch(argv: list[str], options: LaunchOptions) -> int:
        calls.append((argv, options))
        return 7

    monkeypatch.setitem(sys.modules, "fp8console.cli.launch", types.SimpleNamespace(launch=launch))
    return calls


def make_run(run_id: str = "0101-gpt", steps: int = 30, **info: Any) -> Path:
    run_dir = paths.state_root() / run_id
    run_dir.mkdir(parents=True)
    described = {"id": run_id, "created": 1e9, "command": ["train.py", "--lr", "1"], "exit_status": 0, **info}
    (run_dir / paths.RUN).write_text(json.dumps(described))
    data = records.header()
    for step in range(1, steps + 1):
        values = {"step": step, "time": 1e9 + step, "duration": 0.1, "loss": 3.0 / step, "grad_norm": 1.0}
        values["scale"] = 1024.0
        flags = 0
        if step == 20:
            values.update(loss=math.nan, grad_norm=math.inf)
            flags = FLAGS["skipped"] | FLAGS["loss_nonfinite"]
        data += records.pack_step(values, flags)
    if steps:
        paths.steps_file(run_dir, 0).write_bytes(data)
    return run_dir


def one_line(text: str) -> str:
    assert text.count("\n") == 1 and text.endswith("\n"), text
    assert "Traceback" not in text and "!" not in text
    return text


# start-up


def run_python(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, check=False)


def test_help_imports_the_standard_library_alone() -> None:
    code = """
import sys
from fp8console.cli.main import main
assert main(["--help"]) == 0
import os
root = os.path.dirname(sys.modules["fp8console"].__file__)
names = {name.split(".")[0] for name in sys.modules} - {"fp8console", "__main__"}
foreign = sorted(name for name in names - set(sys.stdlib_module_names)
                 if "site-packages" in (getattr(sys.modules[name], "__file__", None) or "") and name != "_virtualenv"
                 and not name.startswith(("__editable__", "_distutils_hack", "sitecustomize")))
assert not foreign, foreign
heavy = sorted({"asyncio", "hashlib", "socket", "subprocess", "tempfile"} & names)
print("heavy:", heavy)
"""
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr
    assert "usage: fp8console" in result.stdout


def test_help_is_quick() -> None:
    import time

    def best(words: tuple[str, ...]) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            assert run_python(*words).returncode == 0
            times.append(time.perf_counter() - start)
        return min(times)

    # The budget is 5 bare starts of the interpreter; an absolute time says little on a busy machine.
    assert best(("-m", "fp8console", "--help")) < 5 * best(("-c", "pass"))


def test_help_lists_what_there_is_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n  {name} " in text
    for absent in ("verify", "report", "replay"):
        assert f"\n  {absent}" not in text
    for flag in ("--detach", "--python", "--run-dir", "--total-steps", "--set", "--profile", "--headless"):
        assert flag in text


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "run"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main([command, "--help"]) == 0
    except SystemExit as end:
        assert end.code == 0
    assert "fp8console" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("fp8console 0.")


# the first word


@pytest.mark.parametrize(
    ("words", "kind", "argv"),
    [
        (["train.py"], "script", ["train.py"]),
        (["train.py", "--detach", "-h", "--", "x"], "script", ["train.py", "--detach", "-h", "--", "x"]),
        (["missing.py"], "script", ["missing.py"]),
        (["noextension"], "script", ["noextension"]),
        (["-m", "pkg.train", "--lr", "1"], "module", ["pkg.train", "--lr", "1"]),
        (["--", "torchrun", "--nnodes", "2", "train.py"], "command", ["torchrun", "--nnodes", "2", "train.py"]),
        (["run", "status"], "script", ["status"]),
        (["run", "--detach", "-m", "pkg", "-m"], "module", ["pkg", "-m"]),
        (["--detach", "run", "--", "status"], "command", ["status"]),
        (["run", "--", "--detach"], "command", ["--detach"]),
        (["./status", "x"], "script", ["./status", "x"]),
    ],
)
def test_a_training_is_taken_as_it_stands(
    place: Path, launched: list[tuple[list[str], LaunchOptions]], words: list[str], kind: str, argv: list[str]
) -> None:
    (place / "noextension").touch()
    (place / "status").touch()
    assert main(words) == 7, "the training's own exit status"
    assert launched[0][0] == argv and launched[0][1].kind == kind
    assert launched[0][1].detach is ("--detach" in words[:2] and words[0] != "train.py")


def test_launch_options(place: Path, launched: list[tuple[list[str], LaunchOptions]]) -> None:
    (place / "fp8console.toml").write_text("theme = 'mine'\ncheckpoint_minutes = 1\n")
    words = ["--python", "/usr/bin/python3", "--run-dir=new/here", "--name", "-odd name", "--total-steps", "500"]
    words += ["--headless", "--snapshot-budget=0.02", "--snapshot-memory", "none", "--checkpoint-minutes", "5"]
    words += ["--set", "refresh_hz=2"]
    assert main([*words, "train.py"]) == 7
    options = launched[0][1]
    assert options == LaunchOptions(
        kind="script",
        python="/usr/bin/python3",
        headless=True,
        run_dir=Path("new/here"),
        name="-odd name",
        settings=Settings(total_steps=500, snapshot_budget=0.02, checkpoint_minutes=5, refresh_hz=2, theme="mine"),
    )
    assert not (place / "new").exists(), "parsing makes nothing"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["zzz"], "'zzz' is no command and no file here; commands: attach, ls"),
        (["stauts"], "did you mean status?"),
        (["verify", "train.py"], "'verify' is no command and no file here"),
        (["replay"], "'replay' is no command"),
        (["folder"], "folder is a folder; to launch what is in it: fp8console run folder"),
        (["--detach"], "no training given"),
        (["run"], "no training given"),
        (["run", "--detach"], "no training given"),
        (["-m"], "-m needs a module"),
        (["--"], "-- needs a command"),
        (["--nonsense", "train.py"], "unknown option --nonsense"),
        (["-x"], "unknown option -x"),
        (["--python"], "--python needs a value"),
        (["--total-steps", "many", "train.py"], "--total-steps: total_steps must be a whole number from 1 up, not"),
        (["--total-steps", "0", "train.py"], "--total-steps: total_steps must be a whole number from 1 up"),
        (["--snapshot-budget", "nan", "train.py"], "--snapshot-budget: snapshot_budget must be a number"),
        (["--snapshot-budget", "2", "train.py"], "snapshot_budget must be from 0 to 1, not 2"),
        (["--set", "color=red", "train.py"], "--set: unknown setting 'color'"),
        (["--set", "color", "train.py"], "--set: 'color' is not KEY=VALUE"),
        (["--run-dir", "folder", "train.py"], "--run-dir: folder is not empty"),
        (["--run-dir", "folder/file", "train.py"], "--run-dir: folder/file: Not a directory"),
        (["--detach", "ls"], "--detach is an option of a launch; ls is none"),
        (["status", "--jsno"], "unrecognized arguments: --jsno"),
        (["ls", "-n", "-1"], "whole number from 0 up"),
        (["ctl"], "the following arguments are required: RUN"),
        (["ctl", "x"], "the following arguments are required: COMMAND"),
        (["status"], "no runs in"),
        (["plot", "nope"], "no runs in"),
        (["plot", "--width", "5"], "at least 20 columns"),
        (["plot", "--log", "--linear"], "--log or --linear, not both"),
        (["events", "--kind", "party"], "unknown kind 'party'; known: launched"),
        (["attach"], "no runs in"),
    ],
)
def test_a_wrong_word_gets_one_clear_line(
    place: Path,
    launched: list[tuple[list[str], LaunchOptions]],
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    (place / "folder").mkdir()
    (place / "folder" / "file").touch()
    assert main(words) == 2
    assert not launched
    captured = capsys.readouterr()
    assert said in one_line(captured.err) and captured.out == ""


def test_a_wrong_settings_file_is_named(
    place: Path, launched: list[tuple[list[str], LaunchOptions]], capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "fp8console.toml").write_text("theme = 'x'\nrefresh_hz = 99\n")
    assert main(["train.py"]) == 2
    said = one_line(capsys.readouterr().err)
    assert said == "fp8console: fp8console.toml, line 2: refresh_hz must be from 0.1 to 30, not 99\n"
    assert not launched


def test_no_words_at_all_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: fp8console" in capsys.readouterr().err


# reading commands


def test_ls(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls"]) == 0
    assert "no runs in" in capsys.readouterr().out
    make_run("0101-gpt")
    make_run("0102-cnn", steps=0, created=2e9, exit_status=3, command=["a\x1b[31m\nb.py"])
    assert main(["ls"]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["id", "state", "step", "loss", "age", "command"]
    assert first.split()[:4] == ["0102-cnn", "failed", "-", "-"] and "\x1b" not in first
    assert second.split()[:4] == ["0101-gpt", "finished", "30", "0.1"]
    assert main(["ls", "--json"]) == 0
    assert [run["id"] for run in json.loads(capsys.readouterr().out)] == ["0102-cnn", "0101-gpt"]
    assert main(["ls", "-n", "1"]) == 0
    assert "and 1 more" in capsys.readouterr().out


def test_status(capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(steps=20)
    writer = events.EventWriter(paths.events_file(run_dir, 0))
    point = {"step": 10, "loss": math.nan, "scale": 1024.0, "verified": True, "tag": "v1", "time": 1e9}
    writer.write(events.make("checkpoint", "checkpoint", 10, point=point))
    assert main(["status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    for name in ("id", "state", "pid", "step", "loss", "grad_norm", "scale", "lr", "skipped", "steps_per_second"):
        assert name in found
    assert (found["state"], found["step"], found["loss"], found["grad_norm"]) == ("finished", 20, "NaN", "Infinity")
    assert found["lr"] is None and found["skipped"] == 1 and found["exit_status"] == 0
    (found_point,) = found["restore_points"]
    names = ("step", "kind", "tag", "loss", "scale", "verified")
    assert [found_point[name] for name in names] == [10, "checkpoint", "v1", "NaN", 1024.0, True]
    assert main(["status", "0101"]) == 0
    text = capsys.readouterr().out
    assert "finished, exit 0" in text
    assert "NaN (not finite since step 20)" in text and "learning rate unknown" in text
    assert "loss scale 2^10" in text and "1 skip" in text


def test_status_before_the_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(steps=0, exit_status=None, supervisor=identify(os.getpid()).to_json())
    assert main(["status"]) == 0
    text = capsys.readouterr().out
    assert "starting" in text and "none yet" in text


def test_events(capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run()
    for rank in (None, 0, 1):
        writer = events.EventWriter(paths.events_file(run_dir, rank))
        writer.write(events.make("paused" if rank is not None else "asked", f"by {rank}", 5, value=math.inf))
    assert main(["events"]) == 0
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()] == ["asked", "paused"]
    assert main(["events", "--all-ranks", "--json", "--kind", "paused", "--follow"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(event["rank"], event["value"]) for event in found] == [(0, "Infinity"), (1, "Infinity")]


def test_export(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run()
    assert main(["export"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert len(rows) == 30 and rows[19]["loss"] == "NaN" and rows[19]["skipped"] == "1"
    assert main(["export", "0101", "-o", "out.jsonl"]) == 0
    lines = (place / "out.jsonl").read_text().splitlines()
    assert json.loads(lines[19])["grad_norm"] == "Infinity" and json.loads(lines[0])["lr"] is None
    assert main(["export", "--rank", "3"]) == 1
    assert "no step records of rank 3" in one_line(capsys.readouterr().err)
    assert main(["export", "-o", "missing/out.csv"]) == 1
    assert "missing/out.csv: No such file" in one_line(capsys.readouterr().err)


def test_a_reader_that_leaves_is_no_fault(place: Path) -> None:
    make_run(steps=2000)
    command = f"{sys.executable} -m fp8console export | head -1"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, env=environment)
    assert result.returncode == 0 and result.stderr == "" and result.stdout.startswith("step,")


def test_plot(capsys: pytest.CaptureFixture[str]) -> None:
    make_run()
    assert main(["plot", "--width", "60", "--height", "8"]) == 0
    text = capsys.readouterr().out
    assert "loss; last 0.1 at step 30" in text
    assert "NaN in 1 step: 20" in text and "inf in 1 step: 20" in text
    assert max(len(line) for line in text.splitlines()) <= 60
    assert "\x1b" not in text
    assert main(["plot", "lr"]) == 0
    assert "learning rate: unknown in all 30 steps" in capsys.readouterr().out
    assert main(["plot", "0101", "loss", "grad_norm", "--log", "--width", "200"]) == 0
    capsys.readouterr()
    assert main(["plot", "0101", "losss"]) == 2
    assert "unknown metric 'losss'; known: time, duration, loss" in one_line(capsys.readouterr().err)


VALUES = {
    "one": [2.5],
    "constant": [3.0] * 5,
    "zero": [0.0, 0.0],
    "all NaN": [math.nan, math.nan],
    "all inf": [math.inf, -math.inf],
    "one finite": [math.nan, 5.0, math.inf],
    "not positive": [-1.0, 0.0, 1.0],
    "negative": [-5.0, -1.0],
    "extremes": [1e308, -1e308, 5e-324],
    "tiny": [5e-324, 1e-300, 1e300],
    "gaps": [1.0, math.nan, 1.0, math.nan, 2.0, 2.0],
}


@pytest.mark.parametrize("axis", ["--log", "--linear", None])
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_plot_draws_whatever_was_measured(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    values: list[float],
    axis: str | None,
    encoding: str,
) -> None:
    run_dir = make_run(steps=0)
    packed = [records.pack_step({"step": i + 1, "loss": v, "scale": v}, 0) for i, v in enumerate(values)]
    paths.steps_file(run_dir, 0).write_bytes(records.header() + b"".join(packed))
    monkeypatch.setattr("fp8console.cli.plot._draws_braille", lambda: encoding != "ascii")
    assert main(["plot", "0101", "loss", "scale", "--width", "50", "--height", "6", *([axis] if axis else [])]) == 0
    text = capsys.readouterr().out
    text.encode(encoding)
    wrong = sum(math.isnan(value) for value in values)
    assert text.count(f"NaN in {wrong} step") == (2 if wrong else 0)
    if axis == "--log" and any(math.isfinite(value) and value <= 0 for value in values):
        assert "of 0 or less, which a log axis can't show" in text


def test_plot_of_a_run_without_steps(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(steps=0)
    assert main(["plot"]) == 1
    assert "has no steps yet" in one_line(capsys.readouterr().err)


# attach


def test_attach_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    make_run()
    assert main(["attach"]) == 2
    assert "needs a terminal" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize("term", ["dumb", "", "unknown"])
def test_attach_on_a_terminal_that_cannot_draw(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, term: str
) -> None:
    make_run()
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", term)
    assert main(["attach"]) == 2
    assert "can't draw on a terminal of type" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ("detached", "come back with: fp8console attach 0101-gpt"),
        ("stopped", "0101-gpt: told to stop"),
        ("killed", "0101-gpt: told to end now"),
        ("ended", "0101-gpt has ended"),
    ],
)
def test_attach_opens_the_console_and_says_how_it_was_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, left: str, said: str
) -> None:
    run_dir = make_run()
    calls: list[tuple[Any, ...]] = []

    def run_console(where: Path, theme: str, refresh_hz: float) -> str:
        calls.append((where, theme, refresh_hz))
        return left

    monkeypatch.setitem(sys.modules, "fp8console.console.app", types.SimpleNamespace(run_console=run_console))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FP8CONSOLE_REFRESH_HZ", "2")
    assert main(["attach", "--theme", "mine"]) == 0
    assert calls == [(run_dir, "mine", 2)]
    assert said in capsys.readouterr().out


# ctl


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Callable[[dict[str, Any]], list[dict[str, Any]]]]:
    """A run whose supervisor gives one answer; the commands that it got."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(tmp_path / "s"))
    server.listen()
    got: list[dict[str, Any]] = []

    def start(answer: dict[str, Any]) -> list[dict[str, Any]]:
        make_run(socket=str(tmp_path / "s"))

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                buffer = wire.LineBuffer()
                while not (messages := [m for m in buffer.feed(connection.recv(65536)) if "command" in m]):
                    pass
                got.extend(message["command"] for message in messages)
                identifier = messages[0]["id"]
                connection.sendall(wire.encode({"id": identifier, "state": "asked"}))
                connection.sendall(wire.encode({"id": identifier, **answer}))

        threading.Thread(target=serve, daemon=True).start()
        return got

    yield start
    server.close()


def test_ctl_tells_asked_and_applied(
    supervisor: Callable[[dict[str, Any]], list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    got = supervisor({"state": "applied", "step": 812, "detail": {}})
    assert main(["ctl", "0101", "pause"]) == 0
    assert capsys.readouterr().out == "asked: pause\napplied at step 812\n"
    assert got == [{"name": "pause"}]


def test_ctl_rollback_prints_before_and_after(
    supervisor: Callable[[dict[str, Any]], list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    got = supervisor(
        {
            "state": "applied",
            "step": 2380,
            "detail": {
                "to": 2300,
                "where": "disk",
                "before": {"step": 2380, "loss": math.nan, "scale": 4096.0, "lr": 3e-4},
                "after": {"step": 2300, "loss": 2.04, "scale": 2048.0, "lr": None},
                "digest": "ab12",
                "digests_equal": True,
                "data_rewound": False,
                "note": "weights rolled back, data not",
            },
        }
    )
    assert main(["ctl", "newest", "rollback", "2,300", "--lr-scale", "0.5", "--scale", "/2"]) == 0
    assert got == [{"name": "rollback", "to": 2300, "lr_scale": 0.5, "scale": "/2"}]
    assert capsys.readouterr().out.splitlines() == [
        "asked: rollback 2,300 lr_scale=0.5 scale=/2",
        "applied at step 2,380",
        "rolled back to 2,300 (disk)",
        "                 before    after",
        "  step            2,380    2,300",
        "  loss              NaN     2.04",
        "  loss scale       2^12     2^11",
        "  learning rate  0.0003  unknown",
        "digests equal: ab12",
        "weights rolled back, data not",
    ]


def test_ctl_set_says_what_is_now(
    supervisor: Callable[[dict[str, Any]], list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    got = supervisor({"state": "applied", "step": 5, "detail": {"now": {"scale": 1024.0, "cap": None}}})
    assert main(["ctl", "0101", "set", "scale=1024", "cap=off", "--timeout", "5"]) == 0
    assert got == [{"name": "set", "scale": 1024.0, "cap": None}]
    assert capsys.readouterr().out.endswith("applied at step 5\n  scale is now 2^10\n  cap is now off\n")


def test_ctl_json(
    supervisor: Callable[[dict[str, Any]], list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor({"state": "applied", "step": 5, "detail": {"digests_equal": True, "before": {"loss": math.inf}}})
    assert main(["ctl", "0101", "rollback", "best", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["state"], answer["step"], answer["detail"]["before"]["loss"]) == ("applied", 5, "Infinity")


def test_ctl_refused(
    supervisor: Callable[[dict[str, Any]], list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor({"state": "refused", "reason": "no restore point at step 5"})
    assert main(["ctl", "0101", "rollback", "5"]) == 1
    captured = capsys.readouterr()
    assert one_line(captured.err) == "fp8console: refused: no restore point at step 5\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["set", "scale=0"], "scale must be over 0"),
        (["set", "scale=nan"], "finite"),
        (["set", "growth_factor=1"], "growth_factor must be over 1"),
        (["set", "momentum=1"], "unknown setting 'momentum'"),
        (["set", "name=pause"], "unknown setting 'name'"),
        (["set"], "set needs NAME=VALUE"),
        (["set", "scale"], "'scale' is not NAME=VALUE"),
        (["rollback"], "rollback needs a step"),
        (["rollback", "-5"], "rollback needs a step of 0 or more"),
        (["rollback", "5", "6"], "rollback takes no '6'"),
        (["rollback", "5", "--lr-scale", "-1"], "lr_scale must be over 0"),
        (["pause", "now"], "pause takes no 'now'"),
        (["pause", "--tag", "x"], "pause takes no --tag"),
        (["checkpoint", "--tag", "a/b"], "tag must be"),
        (["step", "0"], "step count must be a whole number"),
        (["autopilot", "act"], "unknown command 'autopilot'"),
        (["explode"], "unknown command 'explode'; known: pause"),
    ],
)
@pytest.mark.parametrize("form", ["plain", "json"])
def test_ctl_asks_nothing_with_a_bad_value(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str, form: str
) -> None:
    make_run(socket="/nowhere")
    assert main(["ctl", "0101", *words, *(["--json"] if form == "json" else [])]) == 2
    captured = capsys.readouterr()
    if form == "json":
        answer = json.loads(captured.out)
        assert answer["state"] == "invalid" and said in answer["reason"]
    else:
        assert said in one_line(captured.err) and captured.out == ""


def test_ctl_with_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    make_run()
    assert main(["ctl", "0101", "pause"]) == 1
    assert "pause: no supervisor answers" in one_line(capsys.readouterr().err)
    assert main(["ctl", "0101", "pause", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["state"] == "unanswered"
    assert main(["ctl", "0909", "pause"]) == 2
    assert "no run '0909'" in one_line(capsys.readouterr().err)
    assert main(["ctl", "0101", "pause", "--timeout", "-1"]) == 2
    assert "number of seconds over 0" in one_line(capsys.readouterr().err)


# demo


def test_demo_launches_the_sample_in_fp8(
    launched: list[tuple[list[str], LaunchOptions]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "interpreter", lambda wanted: sys.executable)
    assert main(["--total-steps", "50", "demo", "--detach", "--steps", "50", "--detach"]) == 7
    argv, options = launched[0]
    assert Path(argv[0]).name == "char_gpt.py" and Path(argv[0]).is_file()
    assert argv[1:] == ["--precision", "fp8-e5m2", "--steps", "50", "--detach"]
    assert options.detach and options.kind == "script" and options.settings.total_steps == 50


def test_demo_without_torch_or_interpreter(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fp8console.cli.launch.launch", lambda argv, options: pytest.fail("launched"))
    bare = place / "python"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o700)
    assert main(["demo", "--python", str(bare)]) == 1
    assert f"demo needs PyTorch in {bare}" in one_line(capsys.readouterr().err)
    assert main(["demo", "--python", "/nowhere/python"]) == 1
    assert "/nowhere/python: no such program" in one_line(capsys.readouterr().err)
