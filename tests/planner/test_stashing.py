"""Tables whose weights are on the host while dense layers run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.types import PlannerError
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from tests.builders import bags, each, entries_of, gpus, make_planner
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.planner import planner as planner_module
from torchrec_neuroshard.planner.compat import torchrec_stashes
from torchrec_neuroshard.planner.stashing import stash_enough

pytestmark = pytest.mark.skipif(
    not torchrec_stashes(), reason="TorchRec stashes tables since 1.9"
)
MIB = 2**20
SHARDERS = [EmbeddingBagCollectionSharder()]
FAST, SLOW = 2**30 * 50 / 1000, 2**30 / 1000
"""50 and 1 GiB/s between a device and its host, in bytes per millisecond."""


def model_of(*sizes_mib: int, stashed: tuple[int, ...] = ()) -> Any:
    """One table of each size, 64 columns wide."""
    tables = [
        EmbeddingBagConfig(
            name=f"t{i}",
            num_embeddings=size * MIB // 256,
            embedding_dim=64,
            feature_names=[f"f{i}"],
            **({"stash_weights": True} if i in stashed else {}),
        )
        for i, size in enumerate(sizes_mib)
    ]
    return bags(*tables)


def planner_of(link: float, **arguments: Any) -> Any:
    """A planner for two GPUs of 500 MiB, tables whole and on devices."""
    return make_planner(
        topology=gpus(hbm_cap=500 * MIB, hbm_to_ddr_mem_bw=link),
        constraints=each(3, "table_wise", compute_kernels=["fused"])
        | each(2, "table_wise", compute_kernels=["fused"], pooling_factors=[20.0]),
        **arguments,
    )


def test_copies_of_a_marked_table_are_noted() -> None:
    planner: Any = make_planner(
        topology=gpus(hbm_to_ddr_mem_bw=2**30 * 20 / 1000),
        constraints=each(2, "row_wise"),
        dense_ms=30.0,
    )
    # 10 million rows.
    planner.plan(model_of(2560, 2560, stashed=(1,)), SHARDERS)
    [note] = [n for n in planner.last_result.notes if n.code == "stash"]
    # Half of 2.5 GiB, twice, at 20 x 2^30 / 1e9 = 21.5 GB/s.
    assert note.text == (
        "tables 't1' are stashed: rank 0 copies 1.25 GiB to the host and back in each "
        "iteration, 125 ms at 21.5 GB/s. At most 30 ms of it overlap with "
        "dense layers (dense_ms). No prediction includes the other 95 ms"
    )
    assert planner.stashed_tables == {"t1"}


def test_a_model_that_fits_only_with_stashed_tables_is_planned() -> None:
    model = model_of(300, 300, 300)
    with pytest.raises(PlannerError):
        planner_of(FAST).plan(model, SHARDERS)
    planner = planner_of(FAST, stash_bytes=150 * MIB)
    plan = planner.plan(model, SHARDERS)
    assert {e.compute_kernel for e in entries_of(plan).values()} == {"fused"}
    # Two tables share a rank, which has 100 MiB too little: one of them is enough.
    [stashed] = planner.stashed_tables
    ranks = {n: e.ranks for n, e in entries_of(plan).items()}
    assert sum(r == ranks[stashed] for r in ranks.values()) == 2
    codes = {n.code for n in planner.last_result.notes}
    assert "stash" in codes and "memory" not in codes
    assert planner.last_result.gap < 0.5
    # Stashing cannot free more than there is.
    with pytest.raises(PlannerError):
        planner_of(FAST, stash_bytes=50 * MIB).plan(model, SHARDERS)


@pytest.mark.parametrize(
    ("link", "dense_ms", "stashes"), [(FAST, 100.0, True), (SLOW, 0.0, False)]
)
def test_stashing_is_chosen_if_it_is_faster_with_its_copies(
    link: float, dense_ms: float, stashes: bool
) -> None:
    """t0 and t1 are read 20 times as often as t2, so different ranks are best."""
    model = model_of(200, 200, 400)
    planner = planner_of(link, dense_ms=dense_ms, stash_bytes=200 * MIB)
    planner.plan(model, SHARDERS)
    entries = entries_of(planner.last_plan)
    assert (entries["t0"].ranks != entries["t1"].ranks) == stashes
    assert bool(planner.stashed_tables) == stashes
    plain = planner_of(link, dense_ms=dense_ms)
    plain.plan(model, SHARDERS)
    ours, without = (p.last_result.predicted.critical_path_ms for p in (planner, plain))
    assert (ours < without) if stashes else (ours == without)


class Told(EmbeddingStats):
    """Keeps the plans that TorchRec reports."""

    def __init__(self) -> None:
        self.plans: list[Any] = []

    def log(self, **given: Any) -> None:
        self.plans.append(given["sharding_plan"].plan)


@pytest.mark.parametrize("strict_memory", [False, True])
@pytest.mark.parametrize(
    ("sizes", "link", "dense_ms"),
    [
        ((300, 300, 300), FAST, 0.0),  # fits only with stashed tables
        ((200, 200, 400), FAST, 100.0),  # is faster with them
        ((200, 200, 400), SLOW, 0.0),  # is faster without
    ],
)
def test_callbacks_and_stats_see_one_plan(
    sizes: tuple[int, ...], link: float, dense_ms: float, strict_memory: bool
) -> None:
    seen: list[Any] = []
    told = Told()

    def note(options: Any) -> Any:
        seen.append(options)
        return options

    planner = planner_of(
        link,
        dense_ms=dense_ms,
        stash_bytes=200 * MIB,
        stats=[told],
        callbacks=[note],
        strict_memory=strict_memory,
    )
    plan = planner.plan(model_of(*sizes), SHARDERS)
    assert len(seen) == 1 and seen[0] is planner.get_selected_options()
    assert told.plans == [plan.plan]


def test_a_failure_of_stashing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlannerError, match="no table is stashed, although stash_bytes"):
        planner_of(FAST, stash_bytes=MIB).plan(model_of(300, 300, 300), SHARDERS)
    monkeypatch.setattr(planner_module, "stash_enough", lambda *_: False)
    planner = planner_of(FAST, dense_ms=100.0, stash_bytes=200 * MIB)
    planner.plan(model_of(200, 200, 400), SHARDERS)
    [note] = [n for n in planner.last_result.notes if n.code == "stash"]
    assert note.text.endswith("TorchRec can stash frees too little memory")


def test_marked_tables_are_counted_before_others_are_stashed() -> None:
    model = model_of(300, 300, 300, stashed=(0, 1, 2))
    planner = planner_of(FAST, stash_bytes=150 * MIB)
    planner.plan(model, SHARDERS)
    assert planner.stashed_tables == {"t0", "t1", "t2"}


def test_only_weights_on_devices_are_freed() -> None:
    def option(kernel: str, stash_weights: bool = False) -> Any:
        """A table of 100 MiB on the second rank."""
        shard = SimpleNamespace(rank=1, size=[100 * MIB // 256, 64])
        return SimpleNamespace(
            compute_kernel=kernel,
            stash_weights=stash_weights,
            tensor=torch.empty(0),
            shards=[shard],
        )

    excess_W = np.array([0.0, 50.0 * MIB])
    elsewhere = ("dense", "fused_uvm", "fused_uvm_caching", "key_value")
    for marked in (False, True):
        assert not stash_enough([option(k, marked) for k in elsewhere], excess_W)
    plan = [*map(option, elsewhere), option("fused")]
    assert stash_enough(plan, excess_W)
    assert [o.stash_weights for o in plan] == [False] * 4 + [True]
    assert not stash_enough([option("fused")], np.array([1.0, 0.0]))


def test_wrong_stash_bytes_are_refused() -> None:
    with pytest.raises(ConfigError, match="stash_bytes must be at least 0, got -1"):
        planner_of(FAST, stash_bytes=-1)
    with pytest.raises(ConfigError, match="for GPUs; the topology's device is 'cpu'"):
        make_planner(stash_bytes=1)
    topology = gpus(hbm_cap=500 * MIB)
    with pytest.raises(ConfigError, match="got EmbeddingEnumerator"):
        make_planner(
            topology=topology,
            enumerator=EmbeddingEnumerator(topology, 64),
            stash_bytes=1,
        )
