"""Rules that every named search must keep or refuse."""

import dataclasses
from typing import Any

import pytest

from tests.builders import run_search
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.search import SEARCHES, make_searcher
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel
from torchrec_neuroshard.testing.cases import sample_task


@pytest.mark.parametrize("name", sorted(SEARCHES))
@pytest.mark.parametrize(
    "rules",
    [
        {"allowed_ranks": ((0,), (), (), ())},
        {"apart": ((2, 3),), "together": ((0, 1),)},
    ],
    ids=lambda rules: "-".join(rules),
)
def test_rules_on_ranks_are_kept_or_refused(name: str, rules: dict[str, Any]) -> None:
    task = dataclasses.replace(sample_task(4, 2), **rules)
    named = " and ".join(
        n for n in ("allowed_ranks", "together", "apart") if n in rules
    )
    models = AnalyticCostModel(), AnalyticCommsModel()
    try:
        placement = run_search(make_searcher(name), task, *models).placement
    except ConfigError as error:
        text = f"search '{name}' does not support placement rules ({named})"
        assert text in str(error)
    else:
        placement.check(task)
