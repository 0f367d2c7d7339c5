"""The Python blocks of every page run, in the page's order."""

from __future__ import annotations

import logging
import re
import socket
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.builders import ATTACHES_OPTIMIZERS, bag_config, bag_sharders, bags
from torchrec_neuroshard import NeuroShardPlanner, SearchConfig
from torchrec_neuroshard.hardware.doctor import RELEASES
from torchrec_neuroshard.testing import CostModelContract

NIGHTLY = pytest.mark.nightly
pytestmark = [*ATTACHES_OPTIMIZERS, pytest.mark.distributed]

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
NAMES = ("user", "item", "shop")
NO_GROUP = ("groups", "rehearse", "tutorial_memory")
"""Pages whose blocks need a process without a process group."""
LAUNCHED = ("tutorial_training",)
"""Pages whose first block is a script that torchrun starts."""


def batch() -> KeyedJaggedTensor:
    lengths = torch.full((len(NAMES) * 8,), 2)
    ids = torch.arange(len(NAMES) * 16) % 50
    return KeyedJaggedTensor(list(NAMES), ids, lengths=lengths)


def a_readers_script() -> dict[str, Any]:
    """Return the names that pages take for granted: model, planner, plan, batches."""
    topology = Topology(world_size=1, compute_device="cpu")
    model = bags(
        *(bag_config(0, 50, 8, name=name, feature_names=[name]) for name in NAMES)
    )
    sharders = bag_sharders()
    search = SearchConfig(time_budget_seconds=0.2)
    planner = NeuroShardPlanner(
        topology=topology, batch_size=8, cost_model="cpu", search=search
    )
    plan = planner.plan(model, sharders)
    device = torch.device("cpu")

    def train_step(model: Any, batch: KeyedJaggedTensor) -> None:
        model(batch).values().sum().backward()

    return {
        "DistributedModelParallel": DistributedModelParallel,
        "batches": [batch() for _ in range(3)],
        "dense_optimizer": KeyedOptimizer({}, {}, []),
        "device": device,
        "dist": dist,
        "meta_model": model,
        "model": model,
        "pg": dist.group.WORLD,
        "plan": plan,
        "planner": planner,
        "recent_batches": [batch()],
        "sharded": DistributedModelParallel(
            model, device=device, plan=plan, sharders=sharders
        ),
        "sharders": sharders,
        "topology": topology,
        "train_step": train_step,
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_block_of_a_page_runs(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    blocks = _BLOCK.findall(page.read_text(encoding="utf-8"))
    if not blocks:
        pytest.skip("has no Python")
    monkeypatch.chdir(tmp_path)
    script: dict[str, Any] = {"__name__": "docs"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if page.stem in LAUNCHED:
            with socket.socket() as free:
                free.bind(("", 0))
                port = free.getsockname()[1]
            for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_PORT", port)):
                monkeypatch.setenv(name, str(value))
            monkeypatch.setenv("MASTER_ADDR", "localhost")
            request.addfinalizer(dist.destroy_process_group)
            logger = logging.getLogger("torchrec")
            request.addfinalizer(partial(logger.setLevel, logger.level))
        elif page.stem not in NO_GROUP:
            store = f"file://{tmp_path}/store"
            dist.init_process_group("gloo", store, rank=0, world_size=1)
            request.addfinalizer(dist.destroy_process_group)
            script |= a_readers_script()
        for number, block in enumerate(blocks):
            code = compile(block, f"{page.name}, block {number}", "exec")
            exec(code, script)


def test_the_releases_of_the_install_page_are_the_doctors() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    row = r"^\| ([\d.]+) \| ([\d.]+) \| [\d.]+ \| TorchRec ([\d.]+) \|$"
    rows = re.findall(row, page, re.MULTILINE)
    assert {fbgemm: (torch, torchrec) for torch, fbgemm, torchrec in rows} == RELEASES


def test_every_page_is_in_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r": (\w+\.md)$", site, re.MULTILINE))
    assert listed == {p.name for p in PAGES}


@pytest.mark.parametrize(
    "named",
    ["MeasuredLaunch", "BytesAlone", pytest.param("BestOfThree", marks=NIGHTLY)],
)
def test_what_a_reader_writes_keeps_its_contract(named: str) -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    [code] = [c for c in _BLOCK.findall(page) if f"class {named}(" in c]
    names: dict[str, Any] = {"__name__": "extending"}
    exec(code, names)
    alone = {"make_cost_model": lambda self: names[named]()}
    contract = names.get(f"Test{named}") or type("Held", (CostModelContract,), alone)
    cases = [name for name in dir(contract) if name.startswith("test_")]
    assert len(cases) >= 10
    for case in cases:
        getattr(contract(), case)()
