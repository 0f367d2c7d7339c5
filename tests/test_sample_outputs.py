"""Sample outputs on pages are what their commands print today.

A sample is a fenced block below a comment:

- `<!-- output: COMMAND -->`: lines in the output's order; "..." stands for lines that
  are left out. Seconds may differ, and numbers by 1 %.
- `<!-- output, other figures: COMMAND -->`: all figures may differ, and so may names of
  processors.
- `<!-- error: COMMAND -->`: a message, with other line breaks.
- `<!-- file: NAME -->`: a file that the page's commands read.

COMMAND runs in a folder with the examples and the page's files. It may have a larger
time budget than the page's command, for busy machines.
"""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.builders import torchrun
from torchrec_neuroshard.cli import main

pytestmark = [
    pytest.mark.one_release,
    pytest.mark.filterwarnings("ignore:no cost model was measured"),
]

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "examples/README.md", *(ROOT / "docs").glob("*.md")]
_SAMPLE = r"<!-- {}: ([^>]+?) -->\s*```\w*\n(.*?)```"
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def marked(page: Path, kind: str) -> list[tuple[str, str]]:
    """Return what comments of one kind say, and the blocks below them."""
    pattern = re.compile(_SAMPLE.format(kind), re.DOTALL)
    found = pattern.findall(page.read_text(encoding="utf-8"))
    return [(" ".join(said.split()), text) for said, text in found]


def samples(kind: str) -> list[Any]:
    """Return page, command and text of each sample."""
    return [
        pytest.param(page, *sample, id=f"{page.parent.name}/{page.stem}-{number}")
        for page in sorted(PAGES)
        for number, sample in enumerate(marked(page, kind))
    ]


SAMPLES, OTHER_FIGURES = samples("output"), samples("output, other figures")
ERRORS = samples("error")


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


def check(printed: Iterable[str], text: str, command: str) -> None:
    """Check that the sample's lines are printed in this order."""
    left = iter(printed)
    for line in text.splitlines():
        if line.strip() and line != "...":
            assert any(agree(line.rstrip(), other.rstrip()) for other in left), (
                f"`{command}` prints no line like this, after the ones before: {line}"
            )


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where commands run."""
    monkeypatch.chdir(tmp_path)


def run(page: Path, command: str) -> int:
    """Run a page's command in this process, in a folder with the page's files."""
    shutil.copytree(ROOT / "examples", "examples", dirs_exist_ok=True)
    for name, text in marked(page, "file"):
        Path(name).write_text(text)
    program, *arguments = shlex.split(command)
    if program == "neuroshard":
        return main(arguments)
    assert program == "python"
    script, *arguments = arguments
    status: int = runpy.run_path(script)["main"](arguments)
    return status


@pytest.mark.parametrize(("page", "command", "text"), SAMPLES)
def test_samples_are_current(
    page: Path,
    command: str,
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for part in command.split("; "):
        capsys.readouterr()
        assert run(page, part) == 0
    check(capsys.readouterr().out.splitlines(), text, command)


@pytest.mark.parametrize(("page", "command", "text"), ERRORS)
def test_sample_errors_are_current(
    page: Path,
    command: str,
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(page, command) == 1
    assert " ".join(text.split()) in " ".join(capsys.readouterr().err.split())


@pytest.mark.distributed
@pytest.mark.nightly
@pytest.mark.parametrize(("page", "command", "text"), OTHER_FIGURES)
def test_samples_of_measurements_have_todays_words(
    page: Path, command: str, text: str, tmp_path: Path
) -> None:
    program, *options, num_ranks, script = shlex.split(command)
    assert [program, *options] == ["torchrun", "--standalone", "--nproc-per-node"]
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    printed = torchrun(int(num_ranks), script, folder=tmp_path)
    words = [without_figures(line) for line in printed.splitlines()]
    check(words, "\n".join(map(without_figures, text.splitlines())), command)


def without_figures(line: str) -> str:
    """Return a line's words; figures and what follows "each on" are left out."""
    return " ".join(_NUMBER.sub("", line.partition("each on ")[0]).split())
