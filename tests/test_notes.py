"""Notes of plans: the documentation explains every code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torchrec_neuroshard.notes import NOTE_CODES, Note


def test_the_page_explains_every_code() -> None:
    path = Path(__file__).parents[1] / "docs" / "troubleshooting.md"
    page = path.read_text("utf-8")
    (section,) = re.findall(r"^## Notes$(.*?)(?=^## |\Z)", page, re.DOTALL | re.M)
    assert dict(re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", section, re.M)) == NOTE_CODES


def test_unknown_codes_and_severities_are_refused() -> None:
    with pytest.raises(ValueError, match="code 'odd'"):
        Note("odd", "a text")
    with pytest.raises(ValueError, match="severity 'fatal'"):
        Note("search", "a text", severity="fatal")
