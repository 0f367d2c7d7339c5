"""Codecs of collectives, by the names that `neuroshard sweep --codecs` takes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.types import ModuleSharder

from torchrec_neuroshard.planner.compat import with_codecs
from torchrec_neuroshard.plans.one_rank import quietly

NO_CODEC = "none"
"""Leaves the sharders unchanged."""
CODECS = (NO_CODEC, *(kind.value for kind in CommType))
"""Names that TorchRec has a codec for."""

_FP8_ROW = 128
"""Values that share a scale. TorchRec has no default that works both ways."""


def why_left_out(name: str, device_type: str, group_size: int) -> str | None:
    """Return why a codec is not tried; None if it is.

    Args:
        name: The codec's name.
        device_type: "cuda" or "cpu".
        group_size: Ranks that shard the tables among them.
    """
    if name == CommType.FP32.value:
        return "collectives send fp32 without a codec"
    if device_type == "cpu" and name == CommType.FP8.value:
        return "FBGEMM has no CPU kernel for it"
    if device_type == "cpu" and name == CommType.BF16.value:
        return "TorchRec sends fp16 instead on CPUs"
    if name != NO_CODEC and group_size == 1:
        return "a group of one rank sends nothing"
    return None


def coded_sharders(
    sharders: Sequence[ModuleSharder[Any]], name: str, device_type: str
) -> list[ModuleSharder[Any]]:
    """Return copies of sharders whose collectives use a codec in both directions.

    FP8 and MX4 cannot carry the sums of row-wise shards. TorchRec then sends FP16
    forward and BF16 backward.
    """
    if name == NO_CODEC:
        return list(sharders)
    kind = CommType(name)
    rows = {"fp8_quantize_dim": _FP8_ROW} if kind is CommType.FP8 else {}
    with quietly(logging.ERROR):  # the report says it, too
        registry = get_qcomm_codecs_registry(
            QCommsConfig(forward_precision=kind, backward_precision=kind, **rows),
            device=torch.device(device_type),
        )
    return [with_codecs(sharder, registry) for sharder in sharders]
