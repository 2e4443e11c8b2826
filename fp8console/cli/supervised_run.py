"""A training that a command runs for what it shows: started under a supervisor, ended cleanly."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from fp8console.cli.arguments import CommandFailed, UsageError
from fp8console.cli.launch import LaunchError
from fp8console.cli.options import LaunchOptions
from fp8console.protocol import identity

#: Seconds between two looks at the run.
POLL = 0.1
#: Seconds that the supervisor has, after a kill, to write the end.
LAST_WORDS = 10.0


def launch(training: list[str], options: LaunchOptions) -> tuple[str, Path]:
    """(id, run directory) of ``training``, started. Raises UsageError and CommandFailed."""
    from fp8console.cli import launch

    try:
        python = launch.choose_python(options.python)
        command = launch.build_command(training, options.kind, python)
        if options.kind == "script":
            launch.check_script(training[0], python)
        run_id = launch.make_run_id(options, training)
        run_dir = launch.make_run_dir(run_id, options)
        launch.start_supervisor(run_dir, run_id, command, python, options, training)
    except LaunchError as error:
        raise (UsageError if error.status == 2 else CommandFailed)(str(error)) from None
    return run_id, run_dir


def end(run: Any, number: int, grace: float) -> None:
    """Signal the training, after ``grace`` seconds kill it, and wait until its supervisor has written the end."""
    from fp8console.cli.headless import exit_status

    who = identity.ProcessIdentity.from_json(run.info.get("training"))
    if who is None:
        return
    identity.send_signal(who, signal.Signals(number), group=True)
    kill_at = time.monotonic() + grace
    while exit_status(run) is None and time.monotonic() < kill_at + LAST_WORDS:
        if identity.is_alive(who) and time.monotonic() > kill_at:
            identity.send_signal(who, signal.SIGKILL, group=True)
        time.sleep(POLL)
        run.refresh()


def is_lost(info: dict[str, Any]) -> bool:
    """Whether the training and its supervisor are both gone, by run.json."""
    people = [identity.ProcessIdentity.from_json(info.get(name)) for name in ("supervisor", "training")]
    return all(who is not None and not identity.is_alive(who) for who in people)
