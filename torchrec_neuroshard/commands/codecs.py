"""Codecs of collectives by name, as `neuroshard sweep --codecs` tries them."""

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

from torchrec_neuroshard.errors import ConfigError, suggestion
from torchrec_neuroshard.planner.compat import with_codecs
from torchrec_neuroshard.plans.rehearse import quietly

__all__ = ["NO_CODEC", "check_codecs", "coded_sharders", "why_left_out"]

NO_CODEC = "none"
"""The sharders as they are."""

_NAMES = {NO_CODEC, *(kind.value for kind in CommType)}
_FP8_ROW = 128
"""Values that share a scale; TorchRec has no default that both directions take."""


def check_codecs(names: Sequence[str]) -> None:
    """Check that TorchRec has such codecs.

    Raises:
        ConfigError: It has none of a name.
    """
    for name in names:
        if name not in _NAMES:
            near = suggestion(name, _NAMES, "codecs")
            raise ConfigError(f"--codecs has '{name:.60}', which is no codec; {near}")


def why_left_out(name: str, device_type: str, group_size: int) -> str | None:
    """Say why a codec is not tried; None: it is.

    Args:
        name: Of the codec.
        device_type: "cuda" or "cpu".
        group_size: Ranks that share the tables out.
    """
    if name == CommType.FP32.value:
        return "it is what collectives send without a codec"
    if device_type == "cpu" and name == CommType.FP8.value:
        return "FBGEMM has no kernel of it on CPUs"
    if device_type == "cpu" and name == CommType.BF16.value:
        return "TorchRec sends fp16 in its place on CPUs"
    if name != NO_CODEC and group_size == 1:
        return "a group of one rank sends nothing"
    return None


def coded_sharders(
    sharders: Sequence[ModuleSharder[Any]], name: str, device_type: str
) -> list[ModuleSharder[Any]]:
    """Return copies of sharders whose collectives take a codec, both ways.

    Sums of row-wise shards, which FP8 and MX4 cannot carry, go as FP16 and come back as
    BF16: that is what TorchRec makes of it.
    """
    if name == NO_CODEC:
        return list(sharders)
    kind = CommType(name)
    rows = {"fp8_quantize_dim": _FP8_ROW} if kind is CommType.FP8 else {}
    with quietly(logging.ERROR):  # TorchRec says what the report says
        registry = get_qcomm_codecs_registry(
            QCommsConfig(forward_precision=kind, backward_precision=kind, **rows),
            device=torch.device(device_type),
        )
    return [with_codecs(sharder, registry) for sharder in sharders]
