"""Options of a launch, parsed and checked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fp8console.cli.arguments import UsageError
from fp8console.cli.launch_words import SETTING_FLAGS, join_values, launch_parser
from fp8console.cli.settings import gather
from fp8console.protocol.settings import Settings


@dataclass(frozen=True)
class LaunchOptions:
    """How to launch. ``kind``: what the training's words are, see ``launch_words.take_training``."""

    kind: str  # "script": [script, *args] | "module": [module, *args] | "command": any command
    python: str | None = None  # interpreter for a script or module; None: this one
    detach: bool = False
    headless: bool = False
    run_dir: Path | None = None  # the run's own directory, new or empty; None: a new one in the folder of runs
    name: str | None = None
    settings: Settings = field(default_factory=Settings)


def parse_options(words: Sequence[str], kind: str) -> LaunchOptions:
    """Launch options from their words (as ``split_options`` gives them), with all settings. Raises UsageError."""
    given = launch_parser().parse_args(join_values(words))
    flags = []
    for flag, (name, *_) in SETTING_FLAGS.items():
        value = getattr(given, flag[2:].replace("-", "_"))
        if value is not None:
            flags.append((flag, name, value))
    for word in given.set or []:
        key, sign, value = word.partition("=")
        if not sign:
            raise UsageError(f"--set: {word!r} is not KEY=VALUE")
        flags.append(("--set", key, value))
    return LaunchOptions(
        kind=kind,
        python=given.python,
        detach=given.detach,
        headless=given.headless,
        run_dir=_new_folder(given.run_dir),
        name=given.name,
        settings=_with_profile(gather(flags), given.profile),
    )


def _with_profile(settings: Settings, name: str | None) -> Settings:
    """The settings with a profile's, from its file or the user's folder. Raises UsageError, with file and line."""
    if name is None:
        return settings
    from fp8console.protocol.profile import ProfileError, as_setting
    from fp8console.runs import profiles

    try:
        path = profiles.find(name, profiles.profiles_root())
        return replace(settings, profile=as_setting(profiles.load(path), path.name))
    except ProfileError as error:
        raise UsageError(f"--profile: {error}") from None


def _new_folder(text: str | None) -> Path | None:
    if text is None:
        return None
    path = Path(text).expanduser()
    try:
        if os.listdir(path):
            raise UsageError(f"--run-dir: {text} is not empty; a run's directory must be new or empty")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UsageError(f"--run-dir: {text}: {error.strerror}") from None
    return path
