"""Profiles as files: what is written reads back equal, what is wrong is named with its line, the folder is searched."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from baseline_runs import layer, write_run
from hypothesis import given
from hypothesis import strategies as st

from fp8console.cli.arguments import UsageError
from fp8console.cli.main import main
from fp8console.cli.options import parse_options
from fp8console.protocol.profile import ProfileError, as_setting, check_profile, setting_rule
from fp8console.runs import profiles
from fp8console.runs.baseline import read_baseline
from fp8console.runs.tuned import made_of, profile_of, profile_text
from fp8console.runs.tuning import tune

toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
values = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False), texts
)
plain = st.recursive(
    values | st.lists(values, max_size=3),
    lambda inner: (
        st.dictionaries(texts, inner, max_size=3)
        | st.lists(st.dictionaries(texts, inner, max_size=3), min_size=1, max_size=2)
    ),
    max_leaves=12,
)


def typed(value: Any) -> Any:
    """1, 1.0 and True are equal, and 0.0 and -0.0: their texts are not."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    return [typed(item) for item in value] if isinstance(value, list) else repr(value)


@given(st.dictionaries(texts, plain, max_size=4), texts)
def test_what_is_written_reads_back_equal(data: dict[str, Any], note: str) -> None:
    notes = {(key,): note for key in data}
    read = toml.loads(profiles.dumps(data, notes, note))
    assert typed(read) == typed(data)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(ProfileError, match=r"scaler\.cap is .*finite numbers only"):
        profiles.dumps({"profile": 1, "scaler": {"cap": value}})
    with pytest.raises(ProfileError, match="cap must be a finite number"):
        check_profile({"profile": 1, "scaler": {"cap": value}})
    with pytest.raises(ProfileError, match="no form for a NoneType"):
        profiles.dumps({"a": [None]})


GOOD = """\
# a profile
profile = 1

[made]
device = "cpu"
batch_size = 8

[scaler]
init_scale = 4096.0  # start
floor = 1.0
cap = 65536.0
growth_interval = 500

[clipping]
clip_norm = 2.0

[clipping.groups]
"odd name" = 1.5

[[layers]]
name = "a"
precision = "fp8"

[[layers]]
name = "b"
precision = "bf16"
sensitivity = 1.5
"""


def test_a_good_file_loads(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(GOOD)
    assert profiles.load(path) == toml.loads(GOOD)


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("profile = 1", "profile = 2", 2, "profile must be 1"),
        ("profile = 1\n", "\n", 1, "the line 'profile = 1' is missing"),
        ("[made]", "[mode]", 4, "unknown section 'mode'; known: profile, made, format"),
        ("batch_size = 8", "batch_size = 0", 6, "batch_size must be a whole number from 1 up, not 0"),
        ("init_scale = 4096.0", "init_scale = nan", 9, "init_scale must be a finite number, not nan"),
        ("init_scale = 4096.0", "init_scale = 0", 9, "init_scale must be from"),
        ("init_scale = 4096.0", "init_scale = 1e9", 9, "init_scale 1e+09 is over cap 65536"),
        ("floor = 1.0", "floor = 1e6", 10, "floor 1e+06 is over cap 65536"),
        ("cap = 65536.0", "kap = 65536.0", 11, "unknown key 'kap'; known: preset"),
        ("growth_interval = 500", "growth_interval = 0.5", 12, "growth_interval must be a whole number from 1 up"),
        ("growth_interval = 500", "growth_factor = 1.0", 12, "growth_factor must be from 1 up"),
        ("growth_interval = 500", "backoff_factor = 1", 12, "backoff_factor must be below 1, not 1"),
        ("growth_interval = 500", "growth_interval = true", 12, "growth_interval must be a whole number"),
        ("clip_norm = 2.0", "clip_norm = 'x'", 15, "clip_norm must be a finite number, not 'x'"),
        ('"odd name" = 1.5', '"odd name" = 0', 18, "odd name must be over 0, not 0"),
        ('precision = "bf16"', 'precision = "fp4"', 26, "precision must be one of fp8, bf16, uncast, not 'fp4'"),
        ('precision = "bf16"\n', "", 24, "a layer needs a name and a precision"),
        ("sensitivity = 1.5", "sensitivity = inf", 27, "sensitivity must be a finite number"),
        ("floor = 1.0", "floor = ", 10, "Invalid value"),
        ("floor = 1.0", "floor = 1.0\nfloor = 2.0", 11, "overwrite"),
        ("[clipping]\n", "clipping = 3\n", 14, "unknown key 'clipping'"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_line(tmp_path: Path, old: str, new: str, line: int, words: str) -> None:
    path = tmp_path / "p.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ProfileError) as caught:
        profiles.load(path)
    assert str(caught.value).startswith(f"{path}, line {line}: "), str(caught.value)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_are_no_text_or_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="No such file"):
        profiles.load(tmp_path / "none.toml")
    (tmp_path / "p.toml").write_bytes(b"profile = 1\n# \xff")
    with pytest.raises(ProfileError, match="not UTF-8 at byte 14"):
        profiles.load(tmp_path / "p.toml")


@pytest.fixture
def tuned(tmp_path: Path) -> tuple[dict[str, Any], str]:
    sizes = {"weight": 0.02, "activation": 1.0, "gradient": 1e-3, "activation_gradient": 1e-3}
    layers = [layer('blocks.0."odd".up', **sizes), layer("norm", type="LayerNorm", **sizes), layer("unseen")]
    baseline = read_baseline(write_run(tmp_path / "run", layers))
    tuning = tune(baseline)
    begun = {"steps": 20, "lr": 1e-6, "model": "Net", "device_name": "cpu", "batch_size": None, "parameters": 10}
    made = made_of({"name": "train.py", "versions": {"torch": "2.13.0+cpu"}}, begun, baseline)
    data = profile_of(tuning, baseline, made)
    return data, profile_text(data, tuning)


def test_a_tunings_profile_is_valid_and_reads_back(tuned: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    data, text = tuned
    check_profile(data)
    assert toml.loads(text) == data
    assert "batch_size" not in data["made"] and data["scaler"]["init_scale"] == 2.0**21
    assert "# 2**(floor(log2(57344 / 0.004)) - 2)" in text
    path = tmp_path / "a" / "p.toml"
    profiles.save(text, path)
    assert profiles.load(path) == data and [file.name for file in path.parent.iterdir()] == ["p.toml"]
    setting = as_setting(data, "p.toml")
    assert setting_rule(setting) is None and setting["format"] == "e5m2" and setting["device"] == "cpu"
    assert "give its file with --profile FILE" in str(setting_rule("p.toml"))
    assert "init_scale" in str(setting_rule({**setting, "scaler": {"init_scale": -1}}))


def test_profiles_are_kept_by_name_and_none_is_written_over(tmp_path: Path) -> None:
    made = {"model": "Char GPT/2", "device": "NVIDIA H200", "batch_size": 64, "torch": "2.13.0+cu126"}
    first = profiles.free_path(tmp_path, made)
    assert first.name == "Char_GPT_2-NVIDIA_H200-b64-torch2.13.0.toml"
    first.write_text(GOOD)
    second = profiles.free_path(tmp_path, made)
    assert second.name == "Char_GPT_2-NVIDIA_H200-b64-torch2.13.0-2.toml"
    assert profiles.free_path(tmp_path, {}).name == "training-device.toml"
    assert profiles.find("Char", tmp_path) == first
    second.write_text(GOOD)
    assert profiles.find(first.stem, tmp_path) == first and profiles.find(str(second), tmp_path) == second
    with pytest.raises(ProfileError, match="'Char' fits 2 profiles"):
        profiles.find("Char", tmp_path)
    with pytest.raises(ProfileError, match="no profile 'x' in"):
        profiles.find("x", tmp_path)
    with pytest.raises(ProfileError, match="no such file"):
        profiles.find("x.toml", tmp_path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "fp8console" / "profiles"
    folder.mkdir(parents=True)
    return folder


def test_profiles_lists_shows_and_compares(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profiles"]) == 0 and "no profiles in" in capsys.readouterr().out
    (folder / "one.toml").write_text(GOOD)
    (folder / "two.toml").write_text(GOOD.replace("4096.0", "1024.0").replace('"bf16"', '"fp8"'))
    (folder / "broken.toml").write_text("profile = 1\nx = 3\n")
    assert main(["profiles", "list"]) == 0
    listed = capsys.readouterr().out
    assert "2^12" in listed and "2^10" in listed and "1 of 2" in listed and "broken.toml, line 2" in listed
    assert main(["profiles", "show", "one"]) == 0 and GOOD in capsys.readouterr().out
    assert main(["profiles", "compare", "one", "two"]) == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows == [["one", "two"], ["scaler.init_scale", "2^12", "2^10"], ["layers.b.precision", "bf16", "fp8"]]
    assert main(["profiles", "compare", "one", "one"]) == 0 and "no difference" in capsys.readouterr().out
    assert main(["profiles", "path", "two"]) == 0 and capsys.readouterr().out.strip() == str(folder / "two.toml")
    assert main(["profiles", "show", "broken"]) == 2 and "line 2" in capsys.readouterr().err
    assert main(["profiles", "show"]) == 2 and "show takes one name" in capsys.readouterr().err
    assert main(["profiles", "list", "--json"]) == 0 and '"problem"' in capsys.readouterr().out


def test_the_launch_option_takes_a_file_or_a_name(folder: Path) -> None:
    (folder / "one.toml").write_text(GOOD)
    for words in (["--profile", "one"], [f"--profile={folder / 'one.toml'}"]):
        taken = parse_options(words, "script").settings.profile
        assert taken is not None and taken["file"] == "one.toml" and taken["scaler"]["init_scale"] == 4096.0
        assert taken["clip_norm"] == 2.0 and taken["clip_groups"] == {"odd name": 1.5}
    (folder / "one.toml").write_text(GOOD.replace("cap", "kap"))
    with pytest.raises(UsageError, match=r"--profile: .*one\.toml, line 11: unknown key 'kap'"):
        parse_options(["--profile", "one"], "script")
    with pytest.raises(UsageError, match="--profile: no profile 'two'"):
        parse_options(["--profile", "two"], "script")
