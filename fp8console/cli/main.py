"""The ``fp8console`` command: what the first word means, and nothing that takes time to import."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from fp8console.cli.arguments import CommandFailed, UsageError
from fp8console.cli.launch_words import launch_parser, split_options, take_training

#: command -> (its words, what it does). Each is a module here with ``main(words) -> int``; the last two launch.
COMMANDS: dict[str, tuple[str, str]] = {
    "attach": ("[RUN]", "open the console on a run"),
    "ls": ("", "runs, newest first"),
    "status": ("[RUN]", "one run at a glance"),
    "events": ("[RUN]", "what happened in a run"),
    "plot": ("[RUN] [METRIC...]", "charts of a run, printed"),
    "ctl": ("RUN COMMAND", "steer a run: pause, roll back, retune, stop"),
    "export": ("[RUN]", "step records as CSV or JSON lines"),
    "check": ("[TRAINING]", "the device's FP8 math, or a training in FP8 against itself without"),
    "tune": ("TRAINING", "find its scaler and clip settings, and the layers to keep in BF16"),
    "profiles": ("[ACTION]", "what tune found, kept: list, show NAME, compare A B"),
    "doctor": ("[TRAINING]", "is this machine, and a script, fit for FP8: what is wrong and what mends it"),
    "demo": ("[ARGS]", "a small GPT in FP8 under the console"),
    "run": ("TRAINING", "launch, whatever the training's name"),
}

USAGE = """\
usage: fp8console [OPTIONS] train.py [ARGS]        launch a training and open the console on it
       fp8console [OPTIONS] -m package.train [ARGS]
       fp8console [OPTIONS] -- torchrun ... train.py     any launcher
       fp8console COMMAND ...

Launch, watch and steer PyTorch training in low precision. The script is not edited.
"""

TAIL = """
RUN is a run's id, a unique part of one, a path, or "newest"; most commands take the newest when it is left out.
The exit status of a launch is the training's own. fp8console COMMAND --help tells more of each command.
"""


def help_text() -> str:
    """The page that ``fp8console --help`` prints."""
    lines = [USAGE, "commands:"]
    lines += [f"  {f'{name} {words}'.strip():<26}{meaning}" for name, (words, meaning) in COMMANDS.items()]
    options = launch_parser().format_help().split("\n\n", 1)[1]
    return "\n".join(lines) + "\n\n" + options.rstrip("\n") + "\n  -h, --help\n  --version\n" + TAIL


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: the training's own, or 2 for words that make no sense."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        # What an output can't show (a name in a locale without its letters) is told by its number.
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        status = _dispatch(words)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except UsageError as error:
        return _complain(error, 2)
    except CommandFailed as error:
        return _complain(error, 1)
    except LookupError as error:
        # RunNotFound, by its base: its module is not imported here.
        if type(error).__name__ != "RunNotFound":
            raise
        return _complain(error, 2)
    except BrokenPipeError:
        # The reader of a pipe left; the interpreter must not complain about it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _complain(error: Exception, status: int) -> int:
    text = str(error)
    print(text if text.startswith(("fp8console:", "fp8console ")) else f"fp8console: {text}", file=sys.stderr)
    return status


def _dispatch(words: list[str]) -> int:
    options, rest = split_options(words)
    if not rest:
        print(help_text() if not options else "fp8console: no training given; see: fp8console --help", file=sys.stderr)
        return 2
    first = rest[0]
    if first in ("-h", "--help"):
        print(help_text(), end="")
        return 0
    if first == "--version":
        from fp8console import __version__

        print(f"fp8console {__version__}")
        return 0
    if first == "run":
        more, training = split_options(rest[1:])
        return launch([*options, *more], training)
    if first == "demo":
        from fp8console.cli import demo

        return demo.main(options, rest[1:])
    if first in COMMANDS:
        if options:
            raise UsageError(f"{options[0]} is an option of a launch; {first} is none")
        module = importlib.import_module(f"fp8console.cli.{first}")
        status: int = module.main(rest[1:])
        return status
    if first not in ("-m", "--") and not first.startswith("-") and not _is_script(first):
        raise UsageError(_unknown(first))
    return launch(options, rest)


def launch(option_words: Sequence[str], training_words: Sequence[str]) -> int:
    """Launches the training that the words name; returns its exit status. Raises UsageError."""
    kind, training = take_training(training_words)

    from fp8console.cli.options import parse_options

    options = parse_options(option_words, kind)

    from fp8console.cli.launch import launch as start

    status: int = start(training, options)
    return status


def _is_script(word: str) -> bool:
    return word.endswith(".py") or os.path.isfile(word)


def _unknown(word: str) -> str:
    if os.path.isdir(word):
        return f"{word} is a folder; to launch what is in it: fp8console run {word}"
    import difflib

    near = difflib.get_close_matches(word, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(COMMANDS)}"
    return f"{word!r} is no command and no file here; {hint}"
