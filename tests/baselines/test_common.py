"""What no search of others can do is refused by all of them alike."""

import dataclasses
from typing import Any

import pytest

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.search import SEARCHES, make_searcher
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel
from torchrec_neuroshard.testing.cases import sample_task

OTHERS = sorted(set(SEARCHES) - {"default"})


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    "rules",
    [
        {"allowed_ranks": ((0,), (), (), ())},
        {"together": ((0, 1),)},
        {"apart": ((2, 3),), "together": ((0, 1),)},
    ],
    ids=lambda rules: "-".join(rules),
)
def test_rules_on_ranks_are_refused(name: str, rules: dict[str, Any]) -> None:
    task = dataclasses.replace(sample_task(4, 2), **rules)
    named = " and ".join(
        n for n in ("allowed_ranks", "together", "apart") if n in rules
    )
    searcher = make_searcher(name)
    with pytest.raises(
        ConfigError, match=f"search '{name}' cannot keep to {named} of the task"
    ):
        searcher.search(task, AnalyticCostModel(), AnalyticCommsModel())


@pytest.mark.parametrize("name", OTHERS)
def test_searches_are_called_what_they_are_asked_for_by(name: str) -> None:
    assert make_searcher(name).name == name
