from __future__ import annotations

from pathlib import Path

import pytest

from fp8console.console import themes


def test_ours_load_and_set_every_variable_of_ours() -> None:
    found, problems = themes.load_all([themes.own_folder()])
    assert problems == []
    assert {theme.name for theme in found} >= {"okabe-ito", "okabe-ito-light", "high-contrast", "sixteen"}
    for theme in found:
        assert set(themes.DEFAULTS) <= set(theme.variables)


@pytest.mark.parametrize(
    ("text", "trouble"),
    [
        ("primary = '#56B4E9'\nprimry = 1", "unknown or unusable key 'primry'"),
        ("primary = 'reddish'", "is no colour"),
        ("dark = true", "primary is missing"),
        ("primary = ", "mine.toml"),
        ("primary = '#000000'\nvariables = 3", "variables a table"),
    ],
)
def test_a_bad_theme_is_one_line_that_names_the_file(tmp_path: Path, text: str, trouble: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    found, problems = themes.load_all([tmp_path])
    assert found == []
    assert len(problems) == 1
    assert str(path) in problems[0]
    assert trouble in problems[0]
    assert "\n" not in problems[0]


def test_a_users_theme_replaces_ours_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "okabe-ito.toml").write_text("primary = '#123456'")
    found, _ = themes.load_all([themes.own_folder(), tmp_path])
    assert [theme.primary for theme in found if theme.name == "okabe-ito"] == ["#123456"]
    assert set(themes.variable_defaults(found[-1])) == set(themes.DEFAULTS)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_what_matters_reads_on_its_background() -> None:
    """Contrast as WCAG 2.1 defines it: 4.5 for text, 3 for curves and marks."""
    for theme in themes.load_all([themes.own_folder()])[0]:
        if theme.ansi:
            continue
        assert theme.background is not None
        below = _luminance(theme.background)

        def contrast(colour: str | None, below: float = below) -> float:
            assert colour is not None
            above = _luminance(colour)
            return (max(above, below) + 0.05) / (min(above, below) + 0.05)

        for colour in (theme.foreground, theme.error, theme.warning, theme.success, theme.variables["faint"]):
            assert contrast(colour) >= 4.5, (theme.name, colour)
        for name in ("heat-2", "heat-3", "heat-4"):
            assert contrast(theme.variables[name]) >= 3, (theme.name, name)
        for name in ("plot-loss", "plot-norm", "plot-scale", "mark-skipped", "mark-alert", "mark-rollback"):
            assert contrast(theme.variables[name]) >= 3, (theme.name, name)
