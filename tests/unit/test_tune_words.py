"""The words of tune: its own, a launch's, and the training's, which stay as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8console.cli.arguments import UsageError
from fp8console.cli.tune import changes
from fp8console.cli.tune_words import parse


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_defaults_and_the_baselines_settings() -> None:
    given = parse(["train.py", "--steps", "7", "-o", "x"])
    assert given.training == ["train.py", "--steps", "7", "-o", "x"] and given.options.kind == "script"
    settings = given.options.settings
    assert (settings.tune_steps, settings.tune_lr, settings.tune_goes_on) == (100, 1e-6, False)
    assert (settings.layer_steps, settings.layer_budget) == (1, 1.0)
    assert (settings.snapshot_budget, settings.checkpoint_minutes) == (0.0, 0.0)
    assert (given.format, given.margin, given.output) == (None, None, None)


def test_options_of_both_kinds_before_any_training() -> None:
    words = ["--steps=20", "--name", "-x", "--lr", "1e-5", "--total-steps", "500", "-o", "p.toml", "--then-train"]
    given = parse([*words, "--set", "theme=x", "--format", "float8_e4m3", "--", "torchrun", "--steps", "train.py"])
    assert given.training == ["torchrun", "--steps", "train.py"] and given.options.kind == "command"
    settings = given.options.settings
    assert (settings.tune_steps, settings.tune_lr, settings.tune_goes_on) == (20, 1e-5, True)
    assert (settings.total_steps, settings.theme, given.options.name) == (500, "x", "-x")
    assert settings.snapshot_budget == 0.01 and settings.checkpoint_minutes == 10.0
    assert given.format == "e4m3fn" and given.output == Path("p.toml") and given.then_train
    assert parse(["-m", "pkg.train", "--lr", "3"]).training == ["pkg.train", "--lr", "3"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "no training given"),
        (["--steps", "20"], "no training given"),
        (["--steps", "5", "t.py"], "--steps: must be a whole number from 6 up, not '5'"),
        (["--steps", "1e2", "t.py"], "must be a whole number from 6 up"),
        (["--steps"], "--steps needs a value"),
        (["--lr", "0", "t.py"], "--lr: must be a finite number over 0, not '0'"),
        (["--lr", "nan", "t.py"], "must be a finite number over 0"),
        (["--margin", "-1", "t.py"], "--margin: must be a whole number of bits from 0 to 16"),
        (["--format", "e3m4", "t.py"], "--format must be one of e4m3fn, e5m2"),
        (["-o", "no/such/p.toml", "t.py"], "-o no/such/p.toml: no such folder: no/such"),
        (["--clip-factor", "inf", "t.py"], "--clip-factor: must be a finite number over 0"),
        (["--stepz", "5", "t.py"], "unknown option --stepz"),
        (["--set", "layer_budget=2", "t.py"], "layer_budget must be"),
        (["--"], "-- needs a command"),
    ],
)
def test_a_wrong_word_is_one_line(words: list[str], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(words)
    assert text in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("clip_limit", "clip_norm"), [(1.0, None), (35.0, None), (50.0, 35.0), (None, 35.0)])
def test_a_smaller_limit_of_the_scripts_own_stays_when_the_training_goes_on(
    clip_limit: float | None, clip_norm: float | None
) -> None:
    made = {"scaler": {"preset": "headroom", "margin": 3, "init_scale": 8.0}, "clipping": {"clip_norm": 35.0}}
    stock = changes(made, {"class_name": "GradScaler"}, clip_limit)
    assert stock == {"name": "set", "scale": 8.0} | ({} if clip_norm is None else {"clip_norm": clip_norm})
    assert changes(made, {"margin": 2.0}, 1.0) == {"name": "set", "scale": 8.0, "margin": 3}
    assert changes(made, None, 1.0) == {"name": "set"}
