"""Kernels and sharding types that TorchRec adds, searched and priced like others."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, enumerators
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

from tests.builders import each, entries_of, gpus, last_result, make_ebc, make_planner
from torchrec_neuroshard import rehearse
from torchrec_neuroshard.errors import PlanFileError
from torchrec_neuroshard.planner.checks import KNOWN_VALUES
from torchrec_neuroshard.plans.plan_files import load_plan, save_plan
from torchrec_neuroshard.tables.sharding_types import SHARDING_TYPES

VIRTUAL = "ssd_virtual_table"
KERNELS = [
    k.value
    for k in EmbeddingComputeKernel
    if k.value in ("fused_triton", "key_value", VIRTUAL)
]


class Sharder(EmbeddingBagCollectionSharder):
    """A sharder that offers one more kernel."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.kernel = kernel

    def compute_kernels(self, *arguments: Any, **named: Any) -> list[str]:
        return [*super().compute_kernels(*arguments, **named), self.kernel]


@pytest.mark.parametrize("kernel", KERNELS)
def test_new_kernels_are_searched_priced_noted_saved_and_rehearsed(
    kernel: str, tmp_path: Path
) -> None:
    """t1 and t2 run the kernel, t0 the fused one."""
    fields = {f.name for f in dataclasses.fields(ParameterConstraints)}
    virtual = {"use_virtual_table": True} if "use_virtual_table" in fields else {}
    asked = each(
        3, "row_wise", compute_kernels=[kernel], **virtual if kernel == VIRTUAL else {}
    ) | each(1, "row_wise", compute_kernels=["fused"])
    planner: Any = make_planner(topology=gpus(ssd_cap=2**40), constraints=asked)
    model, sharders = make_ebc([(4000, 64)] * 3), [Sharder(kernel)]
    plan, path = planner.plan(model, sharders), tmp_path / "plan"
    found = {n: e.compute_kernel for n, e in entries_of(plan).items()}
    assert found == {"t0": "fused", "t1": kernel, "t2": kernel}
    source = planner.last_result.predicted.compute_source
    assert source == f"analytic; of 3 tables, 2 estimated (kernel {kernel})"
    result = planner.last_result
    assert 0 < result.lower_bound_ms < result.predicted.critical_path_ms
    save_plan(plan, path, model=model, planner=planner)
    assert load_plan(path, model=model, planner=planner, sharders=sharders) == plan
    report = rehearse(model, plan, planner.topology, sharders, batch_size=64)
    assert report.runs and report.num_built == 0
    assert f"not built: kernels {kernel} need their devices" in str(report)
    # As an older release reads it.
    path.write_text(path.read_text().replace(kernel, "fused_later"))
    with pytest.raises(PlanFileError, match=r"'t1'.*'fused_later'"):
        load_plan(path, model=model, planner=planner)
    # It costs as many times the fused kernel as TorchRec says.
    stock = EmbeddingEnumerator(
        planner.topology, planner.batch_size, dict(planner.constraints)
    )
    ours, theirs = (
        {o.name: o.shards[0].perf for o in e.enumerate(model, sharders)}
        for e in (planner.enumerator, stock)
    )
    for phase, launch in zip(
        ("fwd_compute", "bwd_compute"), planner.costs.launch_ms(), strict=True
    ):
        got = (getattr(ours["t1"], phase) - launch) / (
            getattr(ours["t0"], phase) - launch
        )
        expected = getattr(theirs["t1"], phase) / getattr(theirs["t0"], phase)
        assert got == pytest.approx(expected, rel=1e-6)
    for phase in ("fwd_comms", "bwd_comms"):  # outputs are on the device
        assert getattr(ours["t1"], phase) == getattr(ours["t0"], phase)
    slower = theirs["t1"].fwd_compute / theirs["t0"].fwd_compute
    assert slower == pytest.approx(1.0) if kernel == "fused_triton" else slower > 2.0
    assert ours["t0"].fwd_compute != pytest.approx(theirs["t0"].fwd_compute)


# --- a sharding type of a later TorchRec needs one row of our table ---


NEW, LIKE = "later_row_wise", "row_wise"


class LaterSharder(EmbeddingBagCollectionSharder):
    """A sharder that offers the new type."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [*super().sharding_types(compute_device_type), NEW]


@pytest.fixture
def later_torchrec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let TorchRec list the new type like row-wise sharding."""

    def known(value: Any) -> Any:
        return LIKE if isinstance(value, str) and value == NEW else value

    for name in ("calculate_shard_sizes_and_offsets", "get_partition_by_type"):
        inner = getattr(enumerators, name)

        def listed(*args: Any, inner: Any = inner, **kwargs: Any) -> Any:
            named = {key: known(value) for key, value in kwargs.items()}
            return inner(*map(known, args), **named)

        monkeypatch.setattr(enumerators, name, listed)
    monkeypatch.setitem(
        KNOWN_VALUES, "sharding_types", [*KNOWN_VALUES["sharding_types"], NEW]
    )


def planned(kind: str) -> tuple[Any, Any]:
    """Return the sharding of each table, and the result of planning."""
    planner = make_planner(
        topology=gpus(4),
        constraints={
            "t0": ParameterConstraints(sharding_types=[kind]),
            "t1": ParameterConstraints(sharding_types=["column_wise", kind]),
        },
        batch_size=512,
        stats=[],  # TorchRec's own statistics switch on the name
    )
    module = make_ebc([(400_000, 64), (1_000, 64)])
    plan = planner.plan(module, [LaterSharder()])
    (tables,) = plan.plan.values()
    return tables, last_result(planner)


@pytest.mark.usefixtures("later_torchrec")
def test_a_row_of_the_table_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    row = dataclasses.replace(SHARDING_TYPES[LIKE], name=NEW)
    monkeypatch.setitem(SHARDING_TYPES, NEW, row)
    tables, result = planned(NEW)
    known, expected = planned(LIKE)
    assert tables["t0"].sharding_type == NEW
    assert [s.shard_sizes for s in tables["t0"].sharding_spec.shards] == [
        s.shard_sizes for s in known["t0"].sharding_spec.shards
    ]
    assert result.fallback is None
    assert result.predicted.critical_path_ms == expected.predicted.critical_path_ms
