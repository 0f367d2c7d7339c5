"""TorchRec's private attributes of a sharded model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.types import ModuleSharder


def can_reshard(sharder: ModuleSharder[Any]) -> bool:
    """Whether TorchRec can move tables of a sharder's modules."""
    return hasattr(sharder, "reshard")


def is_wrapped_by_ddp(model: DistributedModelParallel) -> bool:
    """Whether DistributedDataParallel wraps the dense part, as `reshard` expects."""
    return hasattr(model._dmp_wrapped_module, "module")


def permute_features_again(sharded: Any) -> None:
    """Make a resharded module sort its features by its tables.

    TorchRec sets `_has_features_permute` only once. If the first plan needed no
    permutation, it would stay False, and tables would get the wrong features.
    """
    sharded._has_features_permute = True


def lookups(sharded: Any) -> list[nn.Module]:
    """Return the parts of a sharded module with its kernels."""
    return list(sharded._lookups)


def wait_through(awaitable: Any, around: Callable[[Callable[[], Any]], Any]) -> None:
    """Make an awaitable wait through `around(wait)`; awaitables have no hooks."""
    # Plain setattr would forward the attribute to the output.
    object.__setattr__(awaitable, "_wait_impl", partial(around, awaitable._wait_impl))
