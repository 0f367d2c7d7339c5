"""The documented recipe for TorchEasyRec, with stand-ins for its modules."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import nn
from torchrec.distributed.planner import ParameterConstraints

from tests.builders import (
    bag_config,
    bag_sharders,
    bags,
    gpus,
    make_planner,
    types_of,
)

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


class EmbeddingGroupImpl(nn.Module):
    """A stand-in for a module of TorchEasyRec, with bags and their constraints."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.ebc = bags(bag_config(0, 4_000, 64), bag_config(1, 100, 16))
        self._constraints = {"t0": ParameterConstraints(sharding_types=[kind])}

    def parameter_constraints(self, prefix: str) -> dict[str, ParameterConstraints]:
        return {f"{prefix}ebc.{name}": c for name, c in self._constraints.items()}


def test_constraints_that_modules_name_by_path_are_kept() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(code.partition("planner = ")[0], names)
    impls = {
        "deep": EmbeddingGroupImpl("row_wise"),
        "wide": EmbeddingGroupImpl("table_wise"),
    }
    model = nn.ModuleDict({"embedding_group": nn.ModuleDict(impls)})
    found = names["constraints_by_path"](model)
    assert set(found) == {f"embedding_group.{side}.ebc.t0" for side in impls}
    planner = make_planner(topology=gpus(2), constraints=found)
    types = types_of(planner.plan(model, bag_sharders()))
    assert types["embedding_group.deep.ebc.t0"] == "row_wise"
    assert types["embedding_group.wide.ebc.t0"] == "table_wise"
