"""Drawn damage, and one case of each kind of failure that was found."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import against_files
from tests.fuzz.campaign import judge_drawn

# Nothing but the forking thread has a part in what the children do.
pytestmark = pytest.mark.filterwarnings("ignore")

FOUND: dict[str, tuple[str, str, Any]] = {
    "deep nesting": ("comms records", "r.jsonl", '{"a":' * 10**5 + "\n"),
    "no text": ("compute records", "r.jsonl", b"\x8b\n"),
    "a card that is no text": ("original", "CARD.md", b"\x8b"),
    "a field of a megabyte": ("tables, csv", "t.csv", "name\n" + "a" * 10**6 + "\n"),
    "a long name": ("constraints", "c.json", '{"' + "a" * 10**5 + '": {}}'),
    "a type of a megabyte": (
        "tables, json",
        "t.json",
        '[{"name": "a", "num_embeddings": 9, "embedding_dim": 8, "data_type": "'
        + "y" * 10**6
        + '"}]',
    ),
    "more rows than 64 bits count": (
        "tables, csv",
        "t.csv",
        f"name,num_embeddings,embedding_dim\na,{10**30},8\n",
    ),
    "more rows than a float holds": (
        "tables, json",
        "t.json",
        f'[{{"name": "a", "num_embeddings": 1{"0" * 400}, "embedding_dim": 8}}]',
    ),
    "more tables than there are": (
        "workloads",
        "t.json",
        '{"workloads": [{"name": "b", "groups": [{"num_tables": 1'
        + "0" * 4200
        + ', "rows": 9, "dim": 8, "hotness": 1}]}]}',
    ),
    "more lookups than are a number": (
        "workloads",
        "t.json",
        '{"workloads": [{"rows": [9], "pooling": [1' + "0" * 400 + "]}]}",
    ),
}
"""What was wrong -> kind, file and what it holds."""


@pytest.mark.parametrize("wrong", FOUND)
def test_what_was_found_is_mended(tmp_path: Path, wrong: str) -> None:
    kind, file, content = FOUND[wrong]
    against_files.KINDS[kind].make(tmp_path)
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path / file).write_bytes(data)
    outcome = against_files.in_child(lambda: against_files.use(kind, tmp_path))
    assert not outcome.startswith("failure"), outcome


def test_nothing_that_is_sound_is_refused() -> None:
    folder = against_files.sound_files()
    outcomes = {
        kind: against_files.in_child(partial(against_files.use, kind, folder / kind))
        for kind in against_files.KINDS
    }
    assert set(outcomes.values()) == {"used"}, outcomes


@pytest.mark.parametrize("num_cases", [4, pytest.param(40, marks=pytest.mark.nightly)])
def test_drawn_damage(num_cases: int) -> None:
    outcomes = judge_drawn(num_cases, against_files.draw, against_files.judge)
    assert any(o.startswith("refused") for o in outcomes)
