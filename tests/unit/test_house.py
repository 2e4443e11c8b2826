"""The project's own promises: two commands in the README, and an installed package that needs no checkout."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def installed() -> importlib.metadata.Distribution:
    """fp8console as pip installed it; skips the test where there is none, or only a link to the checkout."""
    for found in importlib.metadata.distributions(name="fp8console"):
        if any(file.name == "main.py" and "cli" in file.parts for file in found.files or ()):
            return found
    pytest.skip("fp8console is not installed here other than as a checkout")


def test_readme_has_two_commands_that_do_their_own_set_up() -> None:
    text = (REPOSITORY / "README.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    assert all(block.startswith("python3 -m venv .venv && ") and block.count("\n") == 1 for block in blocks)
    demo, test = blocks
    assert f"<!-- demo -->\n```sh\n{demo}" in text and demo.rstrip().endswith(".venv/bin/fp8console demo")
    assert f"<!-- test -->\n```sh\n{test}" in text and test.rstrip().endswith(".venv/bin/python -m pytest")


def test_links_in_the_top_level_pages_lead_somewhere() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#]+)", (REPOSITORY / page).read_text()):
            assert target.startswith("https://") or (REPOSITORY / target).exists(), f"{page}: {target}"


def test_test_environment_is_the_pinned_one() -> None:
    for line in (REPOSITORY / "constraints.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        if name in ("torch", "textual"):
            assert importlib.metadata.version(name).split("+")[0] == version


def test_wheel_carries_the_samples_and_the_themes() -> None:
    files = {str(file) for file in installed().files or ()}
    for folder in ("sample_models", "themes"):
        for source in (REPOSITORY / folder).iterdir():
            if source.suffix in (".py", ".toml"):
                assert f"fp8console/_data/{folder}/{source.name}" in files
    assert "fp8console/console/console.tcss" in files


def test_demo_runs_from_the_installed_package(tmp_path: Path) -> None:
    installed()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("FP8CONSOLE_", "PYTHONPATH"))
    }
    environment["XDG_STATE_HOME"] = str(tmp_path)
    command = [sys.executable, "-m", "fp8console", "demo", "--steps", "3", "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 3/3" in done.stdout
    started = next((tmp_path / "fp8console" / "runs").glob("*/run.json")).read_text()
    assert "_data/sample_models/char_gpt.py" in started
