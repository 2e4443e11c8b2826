"""``fp8console ctl``: steer a run from a shell."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8console.cli import wording
from fp8console.cli.arguments import Parser, UsageError, seconds
from fp8console.protocol import client, commands, paths
from fp8console.protocol.numbers import dumps, number

HELP = """\
commands:
  pause                       hold the training at its next step boundary
  resume                      go on
  step [N]                    N steps while paused (default 1)
  checkpoint [--tag T]        a checkpoint on disk now; a tagged one is kept
  rollback STEP|best|last-good [--lr-scale X] [--scale S] [--clip-norm N]
                              put the state of a restore point back
  set NAME=VALUE...           scale (also x2 and /2), growth_factor, backoff_factor, growth_interval,
                              floor, cap, lr_scale, clip_norm, clip_z; of an Fp8GradScaler also margin,
                              hysteresis, refill, smoothing, underflow_tolerance, saturation_tolerance,
                              patience; floor, cap, margin, saturation_tolerance and clip_norm take
                              "off"; clip_norm=auto follows the norms and clips what is more than
                              clip_z deviations above them
  stop                        end the training after a checkpoint
  kill                        end it now

exit status: 0 applied; 1 refused, or nobody answered; 2 a wrong word or value, and nothing was asked.
JSON: one object with "state" ("applied", "refused", "invalid" or "unanswered"), "command", "step", "reason"
and "detail"; numbers that are not finite come as the strings "NaN", "Infinity" and "-Infinity".
"""


def main(words: Sequence[str]) -> int:
    """Gives one command to a run's supervisor and prints what became of it."""
    parser = Parser("ctl", "Steer a run.", HELP, usage="fp8console ctl RUN COMMAND [...] [--json] [--timeout S]")
    parser.add_argument("run", metavar="RUN", help='id, unique part of one, path, or "newest"')
    parser.add_argument("command", metavar="COMMAND", help="see below")
    parser.add_argument("words", nargs="*", metavar="...", help="what the command needs")
    parser.add_argument("--tag", help="checkpoint: its tag")
    parser.add_argument("--lr-scale", metavar="X", help="rollback: learning-rate factor from there on")
    parser.add_argument("--scale", metavar="S", help="rollback: loss scale from there on (also x2, /2)")
    parser.add_argument("--clip-norm", metavar="N", help="rollback: clip max-norm from there on")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--timeout", type=seconds, metavar="S", help="wait no longer (default: as long as it takes)")
    given = parser.parse(words)

    from fp8console.runs.find import resolve

    try:
        command = commands.validate(_command(given.command, given.words, given))
    except commands.CommandError as error:
        if given.json:
            print(dumps({"state": "invalid", "reason": str(error)}))
        else:
            print(f"fp8console: refused: {error}", file=sys.stderr)
        return 2
    socket_path = _socket(resolve(given.run))
    try:
        answer = client.send(socket_path, command, given.timeout, None if given.json else _tell_asked(command))
    except client.ClientError as error:
        if given.json:
            print(dumps({"state": "unanswered", "command": command, "reason": str(error)}))
        else:
            print(f"fp8console: {commands.describe(command)}: {error}", file=sys.stderr)
        return 1
    if given.json:
        print(dumps({**answer, "command": command}))
    elif answer["state"] == "refused":
        print(f"fp8console: refused: {wording.printable(answer.get('reason'))}", file=sys.stderr)
    else:
        print("\n".join(describe_applied(command, answer)))
    return 0 if answer["state"] == "applied" else 1


def _command(name: str, words: list[str], given: Any) -> dict[str, Any]:
    """The command as a dictionary, not yet checked. Raises CommandError for words it has no place for."""
    command: dict[str, Any] = {"name": name}
    rest = list(words)
    if name == "set":
        assignments = commands.parse_assignments(rest)
        if "name" in assignments:
            raise commands.CommandError(f"unknown setting 'name'; known: {', '.join(commands.SETTINGS)}")
        command.update(assignments)
        rest = []
    elif name in ("step", "rollback") and rest:
        command["count" if name == "step" else "to"] = rest.pop(0)
    if rest and name in commands.NAMES:
        raise commands.CommandError(f"{name} takes no {rest[0]!r}")
    for option in ("tag", "lr_scale", "scale", "clip_norm"):
        value = getattr(given, option)
        if value is None:
            continue
        if name != ("checkpoint" if option == "tag" else "rollback"):
            raise commands.CommandError(f"{name} takes no --{option.replace('_', '-')}")
        command[option] = value
    return command


def _socket(run_dir: Path) -> Path:
    """The socket that run.json names, else the one that follows from the directory's place."""
    try:
        path = json.loads((run_dir / paths.RUN).read_bytes()).get("socket")
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{run_dir / paths.RUN}: {error}") from None
    return Path(path) if isinstance(path, str) and path else paths.socket_path(run_dir)


def _tell_asked(command: dict[str, Any]) -> client.OnState:
    def tell(message: dict[str, Any]) -> None:
        if message.get("state") == "asked":
            print(f"asked: {commands.describe(command)}", flush=True)

    return tell


def describe_applied(command: dict[str, Any], answer: dict[str, Any]) -> list[str]:
    """What an applied command did, in lines for people."""
    detail = answer.get("detail") if isinstance(answer.get("detail"), dict) else {}
    assert isinstance(detail, dict)
    step = answer.get("step")
    lines = [f"applied at step {wording.count(step)}" if step is not None else "applied"]
    if command["name"] == "rollback":
        lines += _rollback_lines(detail)
    elif command["name"] == "set":
        now = detail["now"] if isinstance(detail.get("now"), dict) else {}
        lines += [f"  {name} is now {_setting(name, value)}" for name, value in now.items()]
    elif command["name"] in ("checkpoint", "stop"):
        lines += [f"  {name}: {wording.printable(detail[name])}" for name in ("path", "digest") if detail.get(name)]
    if detail.get("note") and command["name"] != "rollback":
        lines.append(f"  {wording.printable(detail['note'])}")
    return lines


def _setting(name: str, value: Any) -> str:
    if value is None:
        return "off"
    if isinstance(value, str) and number(value) is None:
        return wording.printable(value)
    return wording.loss_scale(value) if name in ("scale", "floor", "cap") else wording.figure(value, 6)


def _rollback_lines(detail: dict[str, Any]) -> list[str]:
    before, after = (side if isinstance(side, dict) else {} for side in (detail.get("before"), detail.get("after")))
    rows = [["", "before", "after"]]
    for name, key, show in (
        ("step", "step", wording.count),
        ("loss", "loss", wording.figure),
        ("loss scale", "scale", wording.loss_scale),
        ("learning rate", "lr", wording.figure),
    ):
        rows.append([name, show(before.get(key)), show(after.get(key))])
    lines = [f"rolled back to {wording.count(detail.get('to'))} ({detail.get('where') or 'place unknown'})"]
    lines += [f"  {line}" for line in wording.table(rows, right=frozenset({1, 2}))]
    equal = detail.get("digests_equal")
    verdict = "digests equal" if equal else ("digests not compared" if equal is None else "digests DIFFER")
    lines.append(f"{verdict}" + (f": {wording.printable(detail['digest'])[:16]}" if detail.get("digest") else ""))
    if detail.get("note"):
        lines.append(wording.printable(detail["note"]))
    return lines
