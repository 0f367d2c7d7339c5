"""Plan TorchRec embedding shards against measured kernel and collective times.

Importing this package is light: it loads neither torch nor torchrec and changes
no global state. Each public name is loaded from its module when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from torchrec_neuroshard.errors import EnvironmentMismatchError, NeuroShardError

if TYPE_CHECKING:
    from torchrec_neuroshard.cost_models import load_cost_model
    from torchrec_neuroshard.placement import Placement
    from torchrec_neuroshard.planner.planners import NeuroShardPlanner
    from torchrec_neuroshard.profiles import FeatureProfile, profile_inputs
    from torchrec_neuroshard.search.base import SearchConfig, SearchResult
    from torchrec_neuroshard.tables import TableConfig

__version__ = "0.1.0"

__all__ = [
    "FeatureProfile",
    "NeuroShardError",
    "NeuroShardPlanner",
    "Placement",
    "SearchConfig",
    "SearchResult",
    "TableConfig",
    "__version__",
    "load_cost_model",
    "profile_inputs",
]

_LOCATIONS = {
    "FeatureProfile": "torchrec_neuroshard.profiles",
    "NeuroShardPlanner": "torchrec_neuroshard.planner.planners",
    "Placement": "torchrec_neuroshard.placement",
    "SearchConfig": "torchrec_neuroshard.search.base",
    "SearchResult": "torchrec_neuroshard.search.base",
    "TableConfig": "torchrec_neuroshard.tables",
    "load_cost_model": "torchrec_neuroshard.cost_models",
    "profile_inputs": "torchrec_neuroshard.profiles",
}

_FRAMEWORKS = ("torch", "fbgemm_gpu", "torchrec")


def __getattr__(name: str) -> object:
    if name not in _LOCATIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value: object = getattr(importlib.import_module(_LOCATIONS[name]), name)
    except (ImportError, OSError) as error:
        # OSError: a shared library built for another torch fails to load.
        if not _is_framework_failure(error):
            raise
        raise EnvironmentMismatchError(
            f"{__name__}.{name} needs torch, fbgemm and torchrec of one release, but "
            f"loading them failed: {error}. Run `python -m torchrec_neuroshard "
            "doctor`: it names what clashes and prints the command that repairs it."
        ) from error
    globals()[name] = value
    return value


def _is_framework_failure(error: ImportError | OSError) -> bool:
    """Whether loading torch, fbgemm or torchrec failed, not one of our modules."""
    if isinstance(error, ImportError):
        module = (error.name or "").partition(".")[0]
        if module in _FRAMEWORKS:
            return True
        return module != __name__ and _passes_through_framework(error)
    return _passes_through_framework(error)


def _passes_through_framework(error: BaseException) -> bool:
    traceback = error.__traceback__
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__", "")
        if str(module).partition(".")[0] in _FRAMEWORKS:
            return True
        traceback = traceback.tb_next
    return False


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
