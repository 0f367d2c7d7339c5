"""The layout of the package: who may import whom, and what `__all__` promises.

Read from the source alone, so that it also covers modules whose frameworks are not
installed, and imports inside functions.
"""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = "torchrec_neuroshard"
ROOT = Path(__file__).parents[1] / PACKAGE

_VALUES = {"errors", "files", "profiles", "tables"}
_TASKS = _VALUES | {"sharding_types", "placement_rules", "placement"}
_DATA = _TASKS | {"access", "records", "workloads", "devices"}
_MODELS = _TASKS | {"records", "devices", "gpu_cards", "features", "cost_models"}
_COSTS = _MODELS | {"cut_off", "schedules", "shard_encoder", "simulator"}

MAY_IMPORT: dict[str, set[str]] = {
    # The way from a table to a plan: each imports only what stands above it.
    "errors": set(),
    "cut_off": set(),
    "progress": set(),
    "files": {"errors"},
    "profiles": {"errors", "files"},
    "access": {"errors", "profiles"},
    "tables": {"errors", "files", "profiles"},
    "sharding_types": set(),
    "placement_rules": {"errors"},
    "placement": _VALUES | {"sharding_types", "placement_rules"},
    "features": _TASKS,
    "cost_models": _MODELS - {"cost_models"},
    "shard_encoder": _MODELS,
    "schedules": {"errors"},
    "simulator": _MODELS | {"schedules", "shard_encoder"},
    "search": _COSTS | {"progress"},
    "baselines": _COSTS
    | {"progress", "search", "record_store", "training.fit", "workloads"},
    "report": _COSTS | {"search", "baselines", "workloads"},
    "planner": _COSTS
    | {"progress", "search", "baselines", "report", "workloads"}
    | {"training.first_launch"},
    "monitor": _COSTS
    | {"planner", "phase_timer", "record_store", "collect.fingerprint"},
    # Beside it.
    "phase_timer": {"devices", "errors", "simulator", "planner.compat"},
    "devices": {"errors"},
    "gpu_cards": {"errors"},
    "records": _VALUES,
    "record_store": {"errors", "files", "profiles", "records"},
    "workloads": _TASKS | {"access", "progress"},
    "collect": _DATA | {"progress", "record_store"},
    "training": _MODELS | {"progress", "collect", "record_store"},
    "testing": _COSTS | {"search"},
    # In front of it: these load the rest by name, when asked to.
    "doctor": {"errors", "progress"},
    "cli": {"errors", "progress", "doctor"},
    "__main__": {"cli"},
}
"""Unit (a subpackage, or a module beside them) -> units, or single modules of them."""

_PARTS = ["compat", "options", "costs", "launch", "parts"]
_PLANNERS = {*_PARTS, "outline", "plan_run", "results", "planners"}

PLANNER_MAY_IMPORT: dict[str, set[str]] = {
    **{room: set(_PARTS[:floor]) for floor, room in enumerate(_PARTS)},
    "outline": {"compat"},
    "plan_run": set(_PARTS),
    "results": set(_PARTS),
    "planners": _PLANNERS - {"planners"},
    "provider": _PLANNERS,
    "plans": _PLANNERS,
    "cli": _PLANNERS | {"plans"},
}
"""The same inside `planner`, of its folders and the modules beside them."""

FENCES = {
    "fbgemm_gpu": ("collect.tbe",),
    "torch.distributed": (
        "collect.collectives",
        "collect.ranks",
        "monitor.exchange",
        "planner",
    ),
    "torchrec": ("phase_timer", "planner"),
}
"""What only these may import; for its types alone (TYPE_CHECKING), all may."""

NAMES_DEVICES = ("devices", "doctor")
"""What knows accelerators by name; the builds of packages are the doctor's."""

NO_GUESSING = ("phase_timer", "planner")
"""Where TorchRec is met: only `COMPAT` asks there what an object has."""

COMPAT = "planner.compat"
"""The one module that knows TorchRec's private attributes and its releases."""

_NO_OTHER_WAY = {
    (f"{PACKAGE}.collect.ranks", "_get_default_store"),
    (f"{PACKAGE}.training.first_launch", "_exit"),
}
"""torch's own private names: there is no public way to a group's store. And Python's
documented way to end a process whose threads may never end."""

_OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}


def is_type_checking(node: ast.If) -> bool:
    return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(tree: ast.AST, module: str, for_types: bool) -> Iterator[tuple[str, int]]:
    """Full names of what is imported, and the lines.

    `from a import b` counts as `a.b`, since b may be a module.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and is_type_checking(node) and not for_types:
            for other in node.orelse:
                yield from imports(ast.Module([other], []), module, for_types)
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parents = module.split(".")[: -node.level]
                source = ".".join([*parents, *filter(None, [source])])
            for alias in node.names:
                yield f"{source}.{alias.name}", node.lineno
        elif isinstance(node, ast.Attribute):
            if ast.unparse(node) == "torch.distributed":
                yield "torch.distributed", node.lineno
        yield from imports(node, module, for_types)


def within(name: str, places: set[str] | tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def find_crossings(module: str, tree: ast.AST) -> list[str]:
    """Imports of our own units that `MAY_IMPORT` does not grant."""
    inner = module.removeprefix(PACKAGE).strip(".")
    unit = inner.partition(".")[0]
    if not inner.removesuffix("__init__"):
        return []  # the front door: checked by tests/test_init.py
    granted = {name: targets | {name} for name, targets in MAY_IMPORT.items()}
    if unit == "planner" and inner != "planner.__init__":
        unit = ".".join(inner.split(".")[:2])
        outside = MAY_IMPORT["planner"]
        granted = {
            f"planner.{room}": outside | {f"planner.{r}" for r in (*rooms, room)}
            for room, rooms in PLANNER_MAY_IMPORT.items()
        }
    if unit not in granted:
        return [f"{module}: the unit {unit!r} is not in MAY_IMPORT; give it a place"]
    found = []
    for name, line in imports(tree, module, for_types=True):
        target = name.removeprefix(PACKAGE).strip(".")
        if not within(name, {PACKAGE}) or target in ("__version__", ""):
            continue
        if not within(target, granted[unit]):
            found.append(f"{module}:{line}: {unit} may not import {name}")
    return found


def find_fence_breaks(module: str, tree: ast.AST) -> list[str]:
    inner = module.removeprefix(f"{PACKAGE}.")
    return [
        f"{module}:{line}: imports {name}; only {', '.join(places)} may"
        for name, line in imports(tree, module, for_types=False)
        for fenced, places in FENCES.items()
        if within(name, {fenced}) and not within(inner, places)
    ]


def bound_names(body: list[ast.stmt]) -> Iterator[str]:
    """Names that a module binds at its top level, in whatever branch."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield from (n.id for n in ast.walk(target) if isinstance(n, ast.Name))
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from bound_names(node.body)
            for branch in (getattr(node, "orelse", []), getattr(node, "finalbody", [])):
                yield from bound_names(branch)
            for handler in getattr(node, "handlers", []):
                yield from bound_names(handler.body)


def export_order(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest: the order that ruff sorts into."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2), name


def imported_modules(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Module -> modules of the package that it imports, if only for types or later.

    The front door imports its guests, and they its version: it is left out.
    """
    found: dict[str, set[str]] = {}
    for module, tree in trees.items():
        for name, _ in imports(tree, module, for_types=True):
            holder = name.rpartition(".")[0]
            places = (name, f"{name}.__init__", holder, f"{holder}.__init__")
            target = next((p for p in places if p in trees), module)
            if target not in (module, f"{PACKAGE}.__init__"):
                found.setdefault(module, set()).add(target)
    return found


def find_circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Names of which each leads to the next and the last to the first, if there are."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def find_export_faults(module: str, tree: ast.Module) -> list[str]:
    """`__all__`, where there is one: sorted, bound, and leaves nothing public out."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            exported: list[str] = ast.literal_eval(node.value)
            break
    else:
        return []
    faults = []
    if exported != sorted(set(exported), key=export_order):
        faults.append(f"{module}: __all__ is not sorted: {exported}")
    if unbound := sorted(set(exported) - set(bound_names(tree.body))):
        faults.append(f"{module}: __all__ names what is not there: {unbound}")
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    public = {n.name for n in tree.body if isinstance(n, definitions)}
    hidden = sorted(n for n in public - set(exported) if not n.startswith("_"))
    if hidden:
        faults.append(f"{module}: public, but not in __all__: {hidden}")
    return faults


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.AST) -> set[str]:
    """Private attributes that classes of a module define or set on `self`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names |= {f.name for f in node.body if isinstance(f, ast.FunctionDef)}
            names |= set(bound_names(node.body))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) in ("self", "cls"):
                names.add(node.attr)
    return set(filter(is_private, names))


def class_names(tree: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Classes of a module, each with the names of its bases."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(b).partition("[")[0] for b in node.bases]
            yield node.name, [b.rpartition(".")[2] for b in bases]


def find_foreign_privates(trees: Mapping[str, ast.Module]) -> list[str]:
    """Private attributes of objects of other modules, and private imports.

    `self` may have those of modules of the package that its module's bases are in.
    """
    privates = {module: private_names(tree) for module, tree in trees.items()}
    home = {name: m for m, tree in trees.items() for name, _ in class_names(tree)}
    found = []
    for module, tree in trees.items():
        if module == f"{PACKAGE}.{COMPAT}":
            continue
        inherited = {
            name
            for _, bases in class_names(tree)
            for base in bases
            if base in home
            for name in privates[home[base]]
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute | ast.Call | ast.ImportFrom):
                continue
            where = f"{module}:{node.lineno}"
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                holder = ast.unparse(node.value)
                own = privates[module] | _OF_NAMED_TUPLES
                if holder in ("self", "cls", "super()"):
                    own = own | inherited
                if node.attr not in own and (module, node.attr) not in _NO_OTHER_WAY:
                    found.append(f"{where}: {holder}.{node.attr}")
            elif isinstance(node, ast.Call) and len(node.args) > 1:
                name = getattr(node.args[1], "value", None)
                if ast.unparse(node.func).endswith("attr") and is_private(name):
                    found.append(f"{where}: {ast.unparse(node)}")
            elif isinstance(node, ast.ImportFrom):
                names = [a.name for a in node.names if is_private(a.name)]
                found += [f"{where}: imports {name}" for name in names]
    return found


def find_guesses(module: str, tree: ast.AST) -> list[str]:
    """Questions what an object or TorchRec has, or which release it is."""
    inner = module.removeprefix(f"{PACKAGE}.")
    if inner == COMPAT or not within(inner, NO_GUESSING):
        return []
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call | ast.ExceptHandler | ast.Compare):
            continue
        asks = False
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            asks = name in ("hasattr", "inspect.signature", "signature") or (
                name == "getattr" and len(node.args) > 2
            )
        elif isinstance(node, ast.ExceptHandler):
            names = ast.walk(node.type) if node.type is not None else ()
            caught = {n.id for n in names if isinstance(n, ast.Name)}
            asks = bool(caught & {"ImportError", "ModuleNotFoundError"})
        else:
            text = ast.unparse(node)
            asks = "__version__" in text or "version(" in text
        if asks:
            text = ast.unparse(node).splitlines()[0]
            found.append(f"{module}:{node.lineno}: {text}")
    return found


def find_device_names(module: str, tree: ast.AST) -> list[str]:
    """Accelerators and their backends by name, outside of `NAMES_DEVICES`."""
    if within(module.removeprefix(f"{PACKAGE}."), NAMES_DEVICES):
        return []
    return [
        f"{module}:{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if (isinstance(node, ast.Constant) and node.value in ("cuda", "nccl"))
        or (isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda")
    ]


@functools.cache
def sources() -> dict[str, ast.Module]:
    """Module name -> syntax tree, for the whole package.

    A package's `__init__` keeps that name, so that relative imports count from it.
    """
    return {
        ".".join((PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)): ast.parse(
            path.read_text("utf-8"), str(path)
        )
        for path in sorted(ROOT.rglob("*.py"))
    }


def test_package_is_found() -> None:
    assert {f"{PACKAGE}.__init__", f"{PACKAGE}.errors"} <= set(sources())


def test_units_import_only_what_lies_below_them() -> None:
    found = [
        f for module, tree in sources().items() for f in find_crossings(module, tree)
    ]
    assert not found, "\n".join(found)


def test_frameworks_stay_behind_their_fences() -> None:
    found = [
        f for module, tree in sources().items() for f in find_fence_breaks(module, tree)
    ]
    assert not found, "\n".join(found)


def test_private_attributes_are_used_at_home() -> None:
    found = find_foreign_privates(sources())
    assert not found, "\n".join(found)


def test_only_one_module_asks_what_torchrec_has() -> None:
    found = [
        f for module, tree in sources().items() for f in find_guesses(module, tree)
    ]
    assert not found, "\n".join(found)


def test_accelerators_are_named_in_one_place() -> None:
    found = [
        f for module, tree in sources().items() for f in find_device_names(module, tree)
    ]
    assert not found, "\n".join(found)


def test_exports_are_sorted_and_complete() -> None:
    found = [
        f
        for module, tree in sources().items()
        for f in find_export_faults(module, tree)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("rules", [MAY_IMPORT, PLANNER_MAY_IMPORT])
def test_the_rules_themselves_have_no_cycle(rules: dict[str, set[str]]) -> None:
    # `training.fit` is one module, not the unit around it.
    assert find_circle(rules) == []


def test_no_modules_import_each_other() -> None:
    assert find_circle(imported_modules(sources())) == []


@pytest.mark.parametrize(
    ("folder", "others"),
    [
        ("examples", {"benchmarks", "harness", "planner_comparison", "tests"}),
        ("benchmarks", {"examples", "tests"}),
    ],
)
def test_examples_and_benchmarks_stand_apart(folder: str, others: set[str]) -> None:
    paths = sorted((ROOT.parent / folder).rglob("*.py"))
    assert paths
    found = [
        f"{path}:{line}: imports {name}"
        for path in paths
        for name, line in imports(ast.parse(path.read_text("utf-8")), "", True)
        if within(name, others)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tables", "from torchrec_neuroshard.search.base import Searcher"),
        ("tables", "from . import features"),
        ("tables", "from .planner import planners"),
        ("errors", "import torchrec_neuroshard.tables"),
        ("errors", "def f():\n    from torchrec_neuroshard import tables"),
        ("search.beam", "from torchrec_neuroshard.baselines import milp"),
        ("search.beam", "from ..collect import timing"),
        ("search.__init__", "from ..planner import planners"),
        ("cost_models.bundle", "from torchrec_neuroshard.collect.console import x"),
        ("cost_models.loading", "from torchrec_neuroshard import training"),
        ("collect.compute", "from torchrec_neuroshard.training.fit import x"),
        ("training.fit", "from torchrec_neuroshard.baselines import policies"),
        ("baselines.common", "from torchrec_neuroshard.training.compute import x"),
        ("simulator", "if TYPE_CHECKING:\n    import torchrec_neuroshard.search"),
        ("simulator", "import torchrec_neuroshard.searching_for_trouble"),
        ("newcomer", "import os"),
        ("planner.costs.memory", "from torchrec_neuroshard.planner.parts import x"),
        ("planner.launch.finalists", "from ..planners import NeuroShardPlanner"),
        ("planner.parts.proposers", "from torchrec_neuroshard.planner import replan"),
        ("planner.plans.replan", "from torchrec_neuroshard import baselines, monitor"),
        ("planner.newcomer", "import os"),
    ],
)
def test_crossing_is_found(module: str, source: str) -> None:
    assert find_crossings(f"{PACKAGE}.{module}", ast.parse(source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("search.beam", "from torchrec_neuroshard import tables"),
        ("search.beam", "from .base import Searcher"),
        ("search.beam", "from . import base"),
        ("search.__init__", "from .base import Searcher"),
        ("search.beam", "from ..simulator import predict"),
        ("training.compute", "from torchrec_neuroshard.record_store import x"),
        ("training.calibrate_cli", "from ..collect.compute import x"),
        ("baselines.common", "from torchrec_neuroshard.training.fit import x"),
        ("tables", "import numpy, tabulate, search"),
        ("cli", "from torchrec_neuroshard import __version__"),
        ("planner.parts.proposers", "from ..options import ways"),
        ("planner.planners", "from torchrec_neuroshard.planner.parts import guards"),
        ("planner.__init__", "from torchrec_neuroshard.planner.plans import replan"),
        ("__init__", "from torchrec_neuroshard.planner.planners import Planner"),
    ],
)
def test_downward_import_is_granted(module: str, source: str) -> None:
    assert find_crossings(f"{PACKAGE}.{module}", ast.parse(source)) == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from .report.html import page", {"report.html"}),
        ("def f():\n    from .report import html", {"report.html"}),
        ("if TYPE_CHECKING:\n    from .report import Page", {"report.__init__"}),
        ("import torchrec_neuroshard.report", {"report.__init__"}),
        ("from . import __version__\nimport html", set()),
    ],
)
def test_circle_is_found(source: str, names: set[str]) -> None:
    back = ast.parse("from ..tables import Table")
    trees = {
        f"{PACKAGE}.{module}": tree
        for module, tree in {
            "__init__": ast.parse("from .tables import Table"),
            "tables": ast.parse(source),
            "report.__init__": back,
            "report.html": back,
        }.items()
    }
    graph = imported_modules(trees)
    assert graph.get(f"{PACKAGE}.tables", set()) == {f"{PACKAGE}.{n}" for n in names}
    assert bool(find_circle(graph)) == bool(names)


@pytest.mark.parametrize(
    ("module", "source", "breaks"),
    [
        ("collect.tbe", "import fbgemm_gpu.split_embedding_configs", False),
        ("collect.tbe", "import torchrec", True),
        ("collect.tbe_helpers", "import fbgemm_gpu", True),
        ("collect.timing", "def f():\n    from fbgemm_gpu import x", True),
        ("planner.parts.guards", "from torchrec.distributed import planner", False),
        ("planner.planners", "import fbgemm_gpu", True),
        ("phase_timer", "from torchrec.distributed import embeddingbag", False),
        ("phase_timer", "import torch.distributed as dist", True),
        ("profiles", "from torchrec.sparse import jagged_tensor", True),
        ("profiles", "if TYPE_CHECKING:\n    import torchrec", False),
        ("profiles", "if TYPE_CHECKING:\n    pass\nelse:\n    import torchrec", True),
        ("profiles", "try:\n    import torchrec\nexcept ImportError:\n    pass", True),
        ("collect.ranks", "import torch.distributed as dist", False),
        ("collect.timing", "import torch.distributed as dist", True),
        ("collect.timing", "from torch import distributed", True),
        ("collect.timing", "import torch\ntorch.distributed.barrier()", True),
        ("collect.timing", "import torch\ntorch.nn.Linear(1, 1)", False),
    ],
)
def test_fence_breaks_are_found(module: str, source: str, breaks: bool) -> None:
    found = find_fence_breaks(f"{PACKAGE}.{module}", ast.parse(source))
    assert bool(found) == breaks


@pytest.mark.parametrize(
    ("source", "breaks"),
    [
        ("planner._topology", True),
        ("x = self._topology", True),
        ("getattr(planner, '_topology')", True),
        ("setattr(planner, '_topology', 1)", True),
        ("from .other import _helper", True),
        ("class A(B):\n    def f(self):\n        return super()._filter()", True),
        ("class A(Other):\n    def f(self, o):\n        return o._theirs", True),
        ("class A(Other):\n    def f(self):\n        return self._theirs", False),
        ("class A:\n    def f(self, o):\n        self._x = o._x", False),
        ("class A:\n    _x: int\ndef f(a):\n    return a._x", False),
        ("planner.topology, planner.__class__, row._asdict()", False),
        ("getattr(planner, 'topology')", False),
    ],
)
def test_foreign_private_is_found(source: str, breaks: bool) -> None:
    other = "class Other:\n    def __init__(self):\n        self._theirs = 1"
    trees = {
        f"{PACKAGE}.planner.module": ast.parse(source),
        f"{PACKAGE}.planner.other": ast.parse(other),
    }
    assert bool(find_foreign_privates(trees)) == breaks
    compat = {f"{PACKAGE}.{COMPAT}": ast.parse(source)}
    assert find_foreign_privates(compat) == []


@pytest.mark.parametrize(
    ("source", "asks"),
    [
        ("hasattr(option, 'stash_weights')", True),
        ("getattr(option, 'stash_weights', None)", True),
        ("inspect.signature(planner.plan)", True),
        ("if torchrec.__version__ >= '1.9': pass", True),
        ("version('torchrec') < '1.9'", True),
        ("try:\n    from torchrec import x\nexcept ImportError:\n    pass", True),
        ("getattr(storage, tier)", False),
        ("try:\n    f()\nexcept ValueError:\n    pass", False),
    ],
)
def test_guess_is_found(source: str, asks: bool) -> None:
    tree = ast.parse(source)
    assert bool(find_guesses(f"{PACKAGE}.planner.plans.replan", tree)) == asks
    for elsewhere in (COMPAT, "search.beam"):
        assert find_guesses(f"{PACKAGE}.{elsewhere}", tree) == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("device.type == 'cuda'", True),
        ("backend = 'nccl' if fast else 'gloo'", True),
        ("torch.cuda.synchronize()", True),
        ("device.type == 'cpu'", False),
        ('"""Of `torch.cuda`; cuda or cpu."""', False),
    ],
)
def test_device_name_is_found(source: str, names: bool) -> None:
    tree = ast.parse(source)
    assert bool(find_device_names(f"{PACKAGE}.collect.ranks", tree)) == names
    assert find_device_names(f"{PACKAGE}.devices", tree) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("__all__ = ['b', 'a']\na = b = 1", "not sorted"),
        ("__all__ = ['a', 'a']\na = 1", "not sorted"),
        ("__all__ = ['Ab', 'B_C']\nAb = B_C = 1", "not sorted"),
        ("__all__ = ['a', 'b']\na = 1", r"not there: \['b'\]"),
        ("__all__ = []\ndef f(): ...", r"not in __all__: \['f'\]"),
    ],
)
def test_export_faults_are_found(source: str, fault: str) -> None:
    with pytest.raises(AssertionError, match=fault):
        assert not find_export_faults("module", ast.parse(source))


def test_names_bound_in_branches_count_as_exports() -> None:
    source = (
        "__all__ = ['A', 'B', 'a', 'b', 'c']\n"
        "if TYPE_CHECKING:\n    from x import A\n"
        "try:\n    import b\nexcept ImportError:\n    b = None\n"
        "else:\n    B: int = 3\n"
        "a, (c, _d) = 1, (2, 3)\n"
        "def _private(): ...\n"
    )
    assert find_export_faults("module", ast.parse(source)) == []
