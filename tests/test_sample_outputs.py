"""Sample outputs on pages are what their commands print today.

A sample is a fenced block below a comment `<!-- output: COMMAND -->`, where COMMAND is
run in the project's folder. Lines stand in the output's order; "..." stands for lines
that are left out. Seconds may differ, and numbers by 1 %.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from torchrec_neuroshard.cli import main

pytestmark = [
    pytest.mark.one_release,
    pytest.mark.filterwarnings("ignore:no cost model was measured"),
]

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "examples/README.md", *(ROOT / "docs").glob("*.md")]
_SAMPLE = re.compile(r"<!-- output: (.+?) -->\s*```\w*\n(.*?)```", re.DOTALL)
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
SAMPLES = [
    pytest.param(" ".join(command.split()), text, id=f"{page.name}-{number}")
    for page in sorted(PAGES)
    for number, (command, text) in enumerate(
        _SAMPLE.findall(page.read_text(encoding="utf-8"))
    )
]


def agree(line: str, other: str) -> bool:
    """Whether two lines have the same words, and numbers within 1 %."""
    if _NUMBER.split(line) != _NUMBER.split(other):
        # Columns may be wider by a digit.
        line, other = (" ".join(text.split()) for text in (line, other))
        if _NUMBER.split(line) != _NUMBER.split(other):
            return False
    if re.search(r" in \d+\.\d s$", line):
        return True
    pairs = zip(_NUMBER.findall(line), _NUMBER.findall(other), strict=True)
    values = [tuple(float(n.replace(",", "")) for n in pair) for pair in pairs]
    return all(first == pytest.approx(second, rel=0.01) for first, second in values)


def test_lines_agree_but_for_seconds_and_rounding() -> None:
    assert agree("planned in 1.8 s", "planned in 2.0 s")
    assert agree("path 2.499 ms", "path 2.501 ms")
    assert not agree("path 2.499 ms", "path 2.599 ms")
    assert not agree("path 2.499 ms", "way 2.499 ms")
    assert not agree("ranks 0, 1", "ranks 0, 2")


def test_pages_have_samples() -> None:
    assert any(str(sample.id).startswith("README.md") for sample in SAMPLES)


@pytest.mark.parametrize(("command", "text"), SAMPLES)
def test_samples_are_current(
    command: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    for part in command.split("; "):
        name, *arguments = shlex.split(part)
        assert name == "neuroshard"
        capsys.readouterr()
        assert main(arguments) in (0, 1)
    printed = iter(capsys.readouterr().out.splitlines())
    for line in text.splitlines():
        if line.strip() and line != "...":
            assert any(agree(line.rstrip(), other) for other in printed), (
                f"`{command}` prints no line like this, after the ones before: {line}"
            )
