"""Launches a training under a supervisor, then opens the console, follows it headless, or leaves."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path

from fp8console.cli.logout import killed_at_logout
from fp8console.cli.options import LaunchOptions
from fp8console.protocol import paths

#: Seconds that a supervisor may take to start.
READY_SECONDS = 30.0


class LaunchError(RuntimeError):
    """The training was not started; the text is one line, ``status`` the exit status."""

    def __init__(self, text: str, status: int = 2) -> None:
        super().__init__(text)
        self.status = status


def launch(argv: list[str], options: LaunchOptions) -> int:
    """Start the training ``argv`` and stay with it as the options say. Returns the exit status for this command."""
    try:
        python = choose_python(options.python)
        command = build_command(argv, options.kind, python)
        if options.kind == "script":
            check_script(argv[0], python)
        if options.kind != "command" and not _has_torch(python):
            say(f"no torch in {python}: nothing will be measured; install torch there or choose another with --python")
        run_id = make_run_id(options, argv)
        run_dir = make_run_dir(run_id, options)
        start_supervisor(run_dir, run_id, command, python, options, argv)
    except LaunchError as error:
        say(str(error))
        return error.status
    warning = killed_at_logout()
    if warning:
        say(warning)
    if options.detach:
        print(run_id)
        return 0
    if options.headless or not sys.stdout.isatty() or not sys.stdin.isatty():
        return _headless(run_dir)
    if os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        terminal = os.environ.get("TERM") or "(TERM is not set)"
        say(f"terminal {terminal} can't show the console; going on without. From another: fp8console attach {run_id}")
        return _headless(run_dir)
    return _console(run_dir, run_id, options)


def say(text: str) -> None:
    """One line for the user, on stderr: stdout belongs to the training's output."""
    print(f"fp8console: {text}", file=sys.stderr, flush=True)


def _headless(run_dir: Path) -> int:
    from fp8console.cli.headless import follow

    return follow(run_dir)


def _console(run_dir: Path, run_id: str, options: LaunchOptions) -> int:
    from fp8console.cli.attach import farewell
    from fp8console.console.app import run_console
    from fp8console.runs.run import Run

    how = run_console(run_dir, theme=options.settings.theme, refresh_hz=options.settings.refresh_hz)
    run = Run(run_dir)
    run.refresh()
    status = run.info.get("exit_status")
    if status is None:
        say(farewell(how, run_id))
        return 0
    say(f"the training ended with exit status {status}; its records: {run_dir}")
    return int(status)


def choose_python(wanted: str | None) -> str:
    """The interpreter for a script: the one asked for, else this one if it has torch, else the first on PATH that has.

    Raises LaunchError when the one asked for is no program.
    """
    if wanted is not None:
        found = shutil.which(os.path.expanduser(wanted))
        if found is None:
            raise LaunchError(f"--python {wanted}: no such program; give the path of an interpreter that has torch")
        return found
    if _has_torch(sys.executable):
        return sys.executable
    virtual = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    candidates = [os.path.join(virtual, "bin", "python")] if virtual else []
    candidates += [found for name in ("python3", "python") if (found := shutil.which(name))]
    for candidate in candidates:
        if os.access(candidate, os.X_OK) and _has_torch(candidate):
            return candidate
    return sys.executable


def _has_torch(python: str) -> bool:
    # find_spec only: importing torch takes seconds.
    code = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    if python == sys.executable:
        import importlib.util

        return importlib.util.find_spec("torch") is not None
    try:
        return subprocess.run([python, "-c", code], capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def build_command(argv: list[str], kind: str, python: str) -> list[str]:
    """The training's command line, as it would be typed without the console."""
    if kind == "script":
        return [python, *argv]
    return [python, "-m", *argv] if kind == "module" else list(argv)


def check_script(script: str, python: str) -> None:
    """Raises LaunchError for a script that is missing, unreadable or, for this very Python, not valid Python."""
    path = Path(script)
    if path.is_dir():
        if (path / "__main__.py").exists():
            return
        raise LaunchError(f"{script} is a folder without __main__.py; name the training script")
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        raise LaunchError(f"no such script: {script} (looked in {os.getcwd()})") from None
    except OSError as error:
        raise LaunchError(f"{script} can't be read: {error.strerror}") from None
    if python != sys.executable or path.suffix != ".py":
        return
    try:
        compile(source, script, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise LaunchError(f"{script}, line {error.lineno}: {error.msg}; mend it and start again", 1) from None
    except ValueError as error:
        raise LaunchError(f"{script}: {error}; mend it and start again", 1) from None


def make_run_id(options: LaunchOptions, argv: list[str]) -> str:
    """A name for the run: when, what, and two random bytes."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{_stem(options, argv)}-{secrets.token_hex(2)}"


def make_run_dir(run_id: str, options: LaunchOptions) -> Path:
    """A new run directory with the probe's folder in it. Raises LaunchError.

    One that the user placed elsewhere gets a link in the folder of runs, so that its id finds it.
    """
    from fp8console.supervisor import site

    if options.run_dir is not None:
        places = [options.run_dir.resolve()]
    else:
        places = [paths.state_root() / run_id, paths.fallback_root() / run_id]
    problem = ""
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            site.build(place / paths.SITE)
            (place / paths.OUTPUT).touch(0o600)
            (place / paths.RESERVE).write_bytes(bytes(paths.RESERVE_BYTES))
        except OSError as error:
            problem = f"{place}: {_reason(error)}"
            continue
        if problem:
            say(f"run directory {problem}; using {place}")
        if options.run_dir is not None or place.parent == paths.fallback_root():
            _link(paths.state_root() / run_id, place)
        return place
    raise LaunchError(f"no run directory can be written ({problem}); choose one with --run-dir DIR")


def _reason(error: OSError) -> str:
    """One line; shutil.Error holds a list of (source, target, reason)."""
    if isinstance(error, shutil.Error) and error.args and error.args[0]:
        return str(error.args[0][0][2])
    return str(error.strerror or error)


def _link(link: Path, target: Path) -> None:
    try:
        link.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        link.symlink_to(target)
    except OSError:
        pass  # the run is found by its path all the same


def _stem(options: LaunchOptions, argv: list[str]) -> str:
    name = options.name or _training_name(options, argv)
    kept = "".join(c if c.isalnum() or c in "._" else "_" for c in Path(name).stem)
    return kept[:40] or "run"


def _training_name(options: LaunchOptions, argv: list[str]) -> str:
    if options.kind == "command":
        scripts = [word for word in argv if word.endswith(".py")]
        return Path(scripts[0] if scripts else argv[0]).name
    return Path(argv[0]).name if options.kind == "script" else argv[0]


def start_supervisor(
    run_dir: Path, run_id: str, command: list[str], python: str, options: LaunchOptions, argv: list[str]
) -> None:
    """Start the supervisor and, through it, the training. Raises LaunchError when either does not start."""
    from fp8console.supervisor import run_file

    name = options.name or _training_name(options, argv)
    run_file.write(run_dir, run_file.describe(run_id, name, command, os.getcwd(), python, options.settings))
    package_parent = Path(__file__).resolve().parent.parent.parent
    # Not -m: the environment and the working folder are the training's and must reach it as they are.
    code = f"import sys; sys.path.insert(0, {str(package_parent)!r}); import fp8console.supervisor.main as m; m.main()"
    read_end, write_end = os.pipe()
    with open(run_dir / "supervisor.log", "ab") as log:
        subprocess.Popen(
            [sys.executable, "-c", code, str(run_dir), str(write_end)],
            stdin=_stdin(options),
            stdout=log,
            stderr=log,
            pass_fds=(write_end,),
            start_new_session=True,
        )
    os.close(write_end)
    answer = _read_answer(read_end)
    if answer == "ok":
        return
    status, text = 1, f"the supervisor did not start; see {run_dir / 'supervisor.log'}"
    if answer.startswith("error "):
        _, number, text = answer.split(" ", 2)
        status = int(number)
    raise LaunchError(text, status)


def _stdin(options: LaunchOptions) -> int | None:
    """A pipe or file is the training's to read; a terminal belongs to the console."""
    try:
        if options.detach or sys.stdin is None or sys.stdin.isatty():
            return subprocess.DEVNULL
        sys.stdin.fileno()
    except (OSError, ValueError):
        return subprocess.DEVNULL
    return None


def _read_answer(fd: int) -> str:
    """The supervisor's word; an end without one is a failure."""
    import select

    data = b""
    end = time.monotonic() + READY_SECONDS
    with os.fdopen(fd, "rb", buffering=0) as pipe:
        while not data.endswith(b"\n") and time.monotonic() < end:
            if not select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
                break
            piece = pipe.read(4096)
            if not piece:
                break
            data += piece
    return data.decode(errors="replace").strip()
