"""Kernels that no bundle holds: searched like others, priced beside the fused."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ShardingOption
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from tests.builders import bags, each, entries_of, gpus, make_ebc, make_planner
from torchrec_neuroshard import rehearse
from torchrec_neuroshard.planner import PlanFileError
from torchrec_neuroshard.plans.plan_files import load_plan, save_plan

VIRTUAL = "ssd_virtual_table"
KERNELS = [
    k.value
    for k in EmbeddingComputeKernel
    if k.value in ("fused_triton", "key_value", VIRTUAL)
]


class Sharder(EmbeddingBagCollectionSharder):
    """Offers a kernel beside TorchRec's."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.kernel = kernel

    def compute_kernels(self, *arguments: Any, **named: Any) -> list[str]:
        return [*super().compute_kernels(*arguments, **named), self.kernel]


@pytest.mark.parametrize("kernel", KERNELS)
def test_searched_priced_flagged_kept_in_files_and_rehearsed(
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
    assert source.endswith("estimated for 2 of 3 tables")
    assert planner.last_result.gap < 0.01  # all tables are part of the bound
    save_plan(plan, path, model=model, planner=planner)
    assert load_plan(path, model=model, planner=planner, sharders=sharders) == plan
    report = rehearse(model, plan, planner.topology, sharders, batch_size=64)
    assert report.runs and report.num_built == 0
    assert f"not built: {kernel} tables need their devices" in str(report)
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


@pytest.mark.skipif(
    "stash_weights" not in inspect.signature(ShardingOption).parameters,
    reason="TorchRec's options say so since 1.9",
)
def test_stashed_tables_are_told_of() -> None:
    tables = [
        EmbeddingBagConfig(
            name=f"t{i}",
            num_embeddings=10_000_000,
            embedding_dim=64,
            feature_names=[f"f{i}"],
            **({"stash_weights": True} if i else {}),
        )
        for i in range(2)
    ]
    planner: Any = make_planner(
        topology=gpus(hbm_to_ddr_mem_bw=2**30 * 20 / 1000),
        constraints=each(2, "row_wise"),
        dense_ms=30.0,
    )
    planner.plan(bags(*tables), [EmbeddingBagCollectionSharder()])
    [note] = [n for n in planner.last_result.notes if n.code == "stash"]
    # Half of 10 million rows of 256 bytes, twice, at 20 x 2^30 / 1e9 = 21.5 GB/s.
    assert note.text.startswith(
        "tables 't1' are stashed: rank 0 copies 1.19 GiB to the host and back in each "
        "iteration, 119 ms at 21.5 GB/s. At most 30 ms of it are hidden by dense "
        "layers (dense_ms). The other 89.2 ms are in no prediction"
    )
