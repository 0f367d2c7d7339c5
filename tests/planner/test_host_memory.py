"""Prices of tables in the host's memory, and of quantised collectives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_configs import DataType

from tests.builders import analytic, each, gpus, make_ebc, only
from torchrec_neuroshard.cost_models import PhysicalCostModel, load_cost_model
from torchrec_neuroshard.features import table_features
from torchrec_neuroshard.planner import NeuroShardEnumerator, PlanCosts
from torchrec_neuroshard.planner.options.table_reader import (
    note_sharders,
    option_codecs,
)

pytestmark = pytest.mark.filterwarnings("ignore:no cost model was measured")

BATCH = 65_536


def costs_and_options(
    kernel: str,
    *,
    ratio: float | None = None,
    qcomms: QCommsConfig | None = None,
    sharding_type: str = "table_wise",
) -> tuple[PlanCosts, list[Any]]:
    # Two nodes: inside one, coding takes longer than it saves.
    topology = gpus(2, 1)
    constraints = only(
        sharding_types=[sharding_type],
        compute_kernels=[kernel],
        pooling_factors=[10.0],
        cache_params=None if ratio is None else CacheParams(load_factor=ratio),
    )
    model = load_cost_model("h100", device_type="cuda")
    costs = PlanCosts(topology, constraints, cost_model=model)
    registry = None
    if qcomms is not None:
        registry = get_qcomm_codecs_registry(qcomms, device=torch.device("cpu"))
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)
    enumerator = NeuroShardEnumerator(topology, BATCH, constraints, costs=costs)
    options = enumerator.enumerate(make_ebc([(2_000_000, 64)]), [sharder])
    note_sharders(options, {o.module_type_key: sharder for o in options})
    return costs, options


def wire_bytes(option: Any) -> tuple[float, ...]:
    return tuple(codec.wire_bytes for codec in option_codecs(option))


def perf(kernel: str, **settings: Any) -> Any:
    _, options = costs_and_options(kernel, **settings)
    return options[0].shards[0].perf


def test_lookups_and_updates_travel_over_the_link() -> None:
    on_device, on_host = perf("fused"), perf("fused_uvm")
    costs, options = costs_and_options("fused_uvm")
    model = costs.cost_model
    assert isinstance(model, PhysicalCostModel)
    table = costs.reader.table(options[0])
    added = model.host_memory(table_features([table], 2 * BATCH), np.ones(1), None)[0]
    beside = (
        on_host.fwd_compute - on_device.fwd_compute,
        on_host.bwd_compute - on_device.bwd_compute,
    )
    np.testing.assert_allclose(beside, added)
    lookups = 2 * BATCH * 10 * 64 * 4 / (55.6e6 * model.constants.host_read)
    np.testing.assert_allclose(added[0], lookups, rtol=1e-3)


def test_a_cache_spares_the_link_the_more_it_holds() -> None:
    host = perf("fused_uvm").fwd_compute
    times = [perf("fused_uvm_caching", ratio=r).fwd_compute for r in (0.99, 0.3, 0.05)]
    assert perf("fused").fwd_compute < times[0] < times[1] < times[2]
    assert times[0] < host


@pytest.mark.parametrize(
    ("sharding_type", "forward", "backward", "sizes"),
    [
        ("table_wise", CommType.FP32, CommType.BF16, (4.0, 2.0)),
        ("row_wise", CommType.FP16, CommType.FP32, (2.0, 4.0)),
    ],
)
def test_quantised_collectives_move_fewer_bytes(
    sharding_type: str,
    forward: CommType,
    backward: CommType,
    sizes: tuple[float, float],
) -> None:
    qcomms = QCommsConfig(forward_precision=forward, backward_precision=backward)
    costs, options = costs_and_options(
        "fused", qcomms=qcomms, sharding_type=sharding_type
    )
    option = options[0]
    assert wire_bytes(option) == sizes
    plain_costs, plain = costs_and_options("fused", sharding_type=sharding_type)
    assert wire_bytes(plain[0]) == (4.0, 4.0)
    index = plain_costs.price(plain).single_comms()[0]
    quantised = costs.price(options).single_comms()[0]
    assert quantised[0] == index[0]  # ids stay as they are
    for way, size in enumerate(sizes, start=1):
        assert (quantised[way] < index[way]) == (size < 4)
        assert (quantised[way] == index[way]) == (size == 4)


@pytest.mark.parametrize(
    ("tables", "fused", "size"),
    [
        (("t0", "t1"), None, 2.0),
        ((), {"output_dtype": SparseType.FP16}, 2.0),
        (("t0",), None, 4.0),  # TorchRec joins a module's outputs in the widest type
    ],
)
def test_half_outputs_take_half(tables: Any, fused: Any, size: float) -> None:
    def outputs(tables: Any = (), fused: Any = None) -> tuple[Any, float]:
        limits = each(2, "table_wise")
        for name in tables:
            limits[name].output_dtype = DataType.FP16
        enumerator = NeuroShardEnumerator(gpus(2), BATCH, limits, **analytic())
        sharders: list[Any] = [EmbeddingBagCollectionSharder(fused_params=fused)]
        options = enumerator.enumerate(make_ebc([(1000, 64)] * 2), sharders)
        for option in options:
            option.shards[0].rank = 0
        assert enumerator.memory is not None
        return wire_bytes(options[0]), enumerator.memory.ranks(options)[0].activations

    (wide, wide_bytes), (found, found_bytes) = outputs(), outputs(tables, fused)
    assert wide == (4.0, 4.0) and found == (size, size)
    values = 2 * 64 * BATCH * 2  # of all samples; those of the own lie beside them
    assert wide_bytes - found_bytes >= (4 - size) * values
