"""``fp8console profiles``: the tuning profiles kept in the user's folder, listed, shown and compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fp8console.cli import wording
from fp8console.cli.arguments import Parser, UsageError
from fp8console.protocol.numbers import dumps
from fp8console.protocol.profile import ProfileError

_EPILOG = """\
actions:
  list           the profiles, newest first (the default)
  show NAME      one, as it is
  compare A B    what differs between two
  path [NAME]    where the folder is, or one profile

A profile is one TOML file: put one that you were given into the folder, or name its path. NAME is a file's path, the
name of one in the folder, or a part of a name that no other has.
"""


def main(words: Sequence[str]) -> int:
    """Prints what was asked for; 1 when `compare` finds differences. Raises UsageError for what can't be read."""
    parser = Parser("profiles", "Profiles that tune has made: a knowledge base to share.", _EPILOG)
    parser.add_argument("action", nargs="?", default="list", choices=("list", "show", "compare", "path"))
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse(words)
    wanted = {"list": (0, 0), "show": (1, 1), "compare": (2, 2), "path": (0, 1)}[given.action]
    if not wanted[0] <= len(given.names) <= wanted[1]:
        what = {"list": "no name", "show": "one name", "compare": "two names", "path": "one name at most"}[given.action]
        raise UsageError(f"fp8console profiles: {given.action} takes {what}")
    try:
        return int(_ACTIONS[given.action](given.names, given.json))
    except ProfileError as error:
        raise UsageError(str(error)) from None


def _list(names: list[str], as_json: bool) -> int:
    from fp8console.runs import profiles

    rows = [["name", "model", "device", "batch", "torch", "format", "init_scale", "bf16 layers", "date"]]
    found: list[dict[str, Any]] = []
    for path in profiles.kept(profiles.profiles_root()):
        try:
            data = profiles.load(path)
        except ProfileError as error:
            found.append({"name": path.stem, "file": str(path), "problem": str(error)})
            continue
        found.append({"name": path.stem, "file": str(path), **{k: v for k, v in data.items() if k != "layers"}})
        made, layers = data.get("made", {}), data.get("layers", [])
        scale = data.get("scaler", {}).get("init_scale")
        kept_out = sum(layer["precision"] == "bf16" for layer in layers)
        row = [path.stem, made.get("model"), made.get("device"), made.get("batch_size"), made.get("torch")]
        row += [data.get("format", {}).get("gradients"), None if scale is None else wording.loss_scale(scale)]
        row += [f"{kept_out} of {len(layers)}" if layers else None, made.get("date")]
        rows.append([wording.UNKNOWN if cell is None else wording.printable(cell) for cell in row])
    if as_json:
        print(dumps(found, indent=1))
        return 0
    if not found:
        print(f"no profiles in {profiles.profiles_root()}; fp8console tune train.py makes one")
        return 0
    if len(rows) > 1:
        print("\n".join(wording.table(rows)))
    for item in found:
        if "problem" in item:
            print(f"not readable: {item['problem']}")
    return 0


def _show(names: list[str], as_json: bool) -> int:
    from fp8console.runs import profiles

    path = profiles.find(names[0], profiles.profiles_root())
    data = profiles.load(path)
    if as_json:
        print(dumps({"name": path.stem, "file": str(path), **data}, indent=1))
    else:
        print(f"# {path}")
        print(path.read_text(encoding="utf-8"), end="")
    return 0


def _compare(names: list[str], as_json: bool) -> int:
    from fp8console.runs import profiles

    both = [profiles.find(name, profiles.profiles_root()) for name in names]
    first, second = (profiles.flat(profiles.load(path)) for path in both)
    keys = list(dict.fromkeys([*first, *second]))
    differing = [key for key in keys if first.get(key) != second.get(key)]
    if as_json:
        print(dumps({key: [first.get(key), second.get(key)] for key in differing}, indent=1))
        return 1 if differing else 0
    if not differing:
        print("no difference")
        return 0
    rows = [["", *(path.stem for path in both)]]
    shown = [key for key in differing if not key.startswith("layers.") or key.endswith(".precision")]
    rows += [[key, _cell(key, first.get(key)), _cell(key, second.get(key))] for key in shown]
    print("\n".join(wording.table(rows)))
    if len(shown) < len(differing):
        print(f"and {wording.plural(len(differing) - len(shown), 'figure')} of layers (--json has them)")
    return 1


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key in ("scaler.init_scale", "scaler.floor", "scaler.cap"):
        return wording.loss_scale(value)
    return wording.figure(value) if isinstance(value, float) else wording.printable(value)


def _path(names: list[str], as_json: bool) -> int:
    from fp8console.runs import profiles

    root = profiles.profiles_root()
    path = profiles.find(names[0], root) if names else root
    print(dumps({"path": str(path)}) if as_json else path)
    return 0


_ACTIONS = {"list": _list, "show": _show, "compare": _compare, "path": _path}
