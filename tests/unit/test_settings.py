"""Settings: who wins, and that nothing wrong is passed over."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8console.cli.arguments import UsageError
from fp8console.cli.settings import gather, parse_text
from fp8console.protocol.settings import NAMES, RULES, SettingError, Settings, check, from_json


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (tmp_path / "config" / "fp8console").mkdir(parents=True)
    return folder


def environment(here: Path, **values: str) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(here.parent / "config"), "HOME": str(here), **values}


def user_file(here: Path, text: str) -> Path:
    path = here.parent / "config" / "fp8console" / "config.toml"
    path.write_text(text)
    return path


def test_every_setting_has_a_rule_that_its_default_keeps() -> None:
    assert set(RULES) == set(NAMES)
    for name, value in Settings().to_json().items():
        check(name, value)


def test_flags_win_then_the_environment_then_the_files(here: Path) -> None:
    user_file(here, "snapshot_count = 3\nrefresh_hz = 1\ntheme = 'mine'\ntotal_steps = 7\n")
    (here / "fp8console.toml").write_text("refresh_hz = 2.5\ntheme = 'ours'\ntotal_steps = 8\n")
    found = gather(
        [("--total-steps", "total_steps", "10")],
        environment(here, FP8CONSOLE_THEME="theirs", FP8CONSOLE_TOTAL_STEPS="9"),
        here,
    )
    assert (found.snapshot_count, found.refresh_hz, found.theme, found.total_steps) == (3, 2.5, "theirs", 10)
    assert found.grace_seconds == Settings().grace_seconds


def test_without_any_source_the_defaults_hold(here: Path) -> None:
    assert gather((), {"HOME": str(here)}, here) == Settings()
    ours = {"FP8CONSOLE_RUN_DIR": "/x", "FP8CONSOLE_LINK": "y", "FP8CONSOLE_SITE": "z"}
    assert gather((), environment(here, **ours), here) == Settings()


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("theme = 'x'\nrefresh = 5\n", 2, "unknown setting 'refresh'"),
        ("\n# note\n\nrefresh_hz = 99\n", 4, "refresh_hz must be from 0.1 to 30, not 99"),
        ("snapshot_budget = nan\n", 1, "snapshot_budget must be a number"),
        ("snapshot_budget = true\n", 1, "snapshot_budget must be a number"),
        ("checkpoints_kept = 2\n", 1, "whole number from 3 up, not 2"),
        ("theme = 5\n", 1, "theme must be a name"),
        ("\n[keys]\npause = 'p'\n", 2, "unknown setting 'keys'"),
        ("theme = 'x'\n'odd key' = 1\n", 2, "unknown setting 'odd key'"),
        ("theme = 'x'\nrefresh_hz = \n", 2, "Invalid value"),
        ("theme = 'x'\ntheme = 'y'\n", 2, "overwrite"),
        ("theme = 'x", 1, ""),
    ],
)
@pytest.mark.parametrize("where", ["here", "user"])
def test_a_wrong_key_or_value_is_named_with_file_and_line(
    here: Path, text: str, line: int, words: str, where: str
) -> None:
    path = here / "fp8console.toml"
    if where == "user":
        path = user_file(here, text)
    else:
        path.write_text(text)
    # Also when something else would win over it.
    with pytest.raises(UsageError) as caught:
        gather([("--set", "refresh_hz", "5")], environment(here), here)
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_no_text_is_named(here: Path) -> None:
    (here / "fp8console.toml").write_bytes(b"theme = '\xff'")
    with pytest.raises(UsageError, match="not UTF-8 at byte 9"):
        gather((), environment(here), here)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("FP8CONSOLE_REFRESH", "5", "FP8CONSOLE_REFRESH in the environment: unknown setting 'refresh'"),
        ("FP8CONSOLE_REFRESH_HZ", "many", "FP8CONSOLE_REFRESH_HZ in the environment: refresh_hz must be a number"),
        ("FP8CONSOLE_REFRESH_HZ", "nan", "refresh_hz must be a number"),
        ("FP8CONSOLE_refresh_hz", "5", "in capitals: FP8CONSOLE_REFRESH_HZ"),
        ("FP8CONSOLE_TOTAL_STEPS", "1.5", "whole number from 1"),
        ("FP8CONSOLE_", "1", "unknown setting ''"),
    ],
)
def test_a_wrong_variable_is_named(here: Path, variable: str, value: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        gather((), environment(here, **{variable: value}), here)
    assert words in str(caught.value)


def test_texts_are_read_by_the_settings_kind() -> None:
    assert parse_text("snapshot_memory_gib", "none") is None
    assert parse_text("snapshot_memory_gib", "2") == 2
    assert parse_text("checkpoint_minutes", "1e1") == 10.0
    assert parse_text("theme", "5") == "5"
    assert parse_text("read_late", "on") is True and parse_text("read_late", "False") is False
    for name, text in (
        ("read_late", "2"),
        ("read_late", "none"),
        ("theme", ""),
        ("snapshot_count", "none"),
        ("snapshot_count", "1.0"),
        ("nothing", "1"),
    ):
        with pytest.raises(SettingError):
            parse_text(name, text)


def test_from_run_json_takes_what_it_can() -> None:
    assert from_json({"theme": "x", "refresh_hz": "fast", "new_in_2030": 1}) == Settings(theme="x")
    assert from_json(None) == from_json([]) == Settings()
    assert from_json(Settings(total_steps=5).to_json()) == Settings(total_steps=5)
