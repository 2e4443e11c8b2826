"""``fp8console demo``: the sample GPT in FP8 under the console."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fp8console.cli.arguments import CommandFailed
from fp8console.cli.launch_words import join_values, launch_parser, split_options

SAMPLE = Path("sample_models") / "char_gpt.py"
HELP = """\
usage: fp8console [OPTIONS] demo [OPTIONS] [ARGS]

A small GPT on real text, its gradients cast through FP8, under the console. OPTIONS are those of a launch
(fp8console --help), ARGS the sample's own, such as --steps 500 or --inject spike@200.
"""


def main(options: Sequence[str], words: Sequence[str]) -> int:
    """Launches the sample; returns its exit status. Raises CommandFailed where it can't run."""
    more, arguments = split_options(words)
    if arguments[:1] in (["-h"], ["--help"]):
        print(HELP, end="")
        return 0
    launch_words = [*options, *more]
    sample = find_sample()
    wanted: str | None = launch_parser().parse_args(join_values(launch_words)).python
    python = interpreter(wanted)
    if not has_torch(python):
        raise CommandFailed(f"demo needs PyTorch in {python}; install torch there, or give --python PATH")

    from fp8console.cli.main import launch

    return launch([*launch_words, "--python", python], [str(sample), "--precision", "fp8-e5m2", *arguments])


def find_sample() -> Path:
    """The sample, from the repository or from the installed package. Raises CommandFailed when there is none."""
    import fp8console

    package = Path(fp8console.__file__).resolve().parent
    places = [package.parent / SAMPLE, package / "_data" / SAMPLE]
    for place in places:
        if place.is_file():
            return place
    looked = " and ".join(str(place.parent) for place in places)
    raise CommandFailed(f"demo: {SAMPLE.name} is not in this installation; looked in {looked}")


def interpreter(wanted: str | None) -> str:
    """The interpreter that a launch would take. Raises CommandFailed for one that is no program."""
    from fp8console.cli.launch import LaunchError, choose_python

    try:
        return choose_python(wanted)
    except LaunchError as error:
        raise CommandFailed(str(error)) from None


def has_torch(python: str) -> bool:
    """Whether that interpreter finds torch; torch is not imported."""
    if python == sys.executable:
        return importlib.util.find_spec("torch") is not None
    look = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    return subprocess.run([python, "-c", look], capture_output=True, check=False).returncode == 0
