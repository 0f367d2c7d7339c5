"""`neuroshard train-policy`: tables and a cost model in, a placement policy out."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from torchrec_neuroshard.baselines.autoshard import (
    AutoShardConfig,
    AutoShardSearcher,
    AutoShardTrainer,
)
from torchrec_neuroshard.baselines.dreamshard import (
    DreamShardConfig,
    DreamShardSearcher,
    DreamShardTrainer,
)
from torchrec_neuroshard.baselines.policies import (
    Policy,
    PolicyInfo,
    PolicySearcher,
    save_policy,
)
from torchrec_neuroshard.baselines.policy_training import (
    Comparison,
    PolicyConfig,
    PolicyTaskConfig,
    PolicyTrainer,
    SimulatedPlans,
    compare,
    finish_training,
    run_training,
    sample_policy_tasks,
    split_tables,
    yardsticks,
)
from torchrec_neuroshard.cost_models.base import CommsModel
from torchrec_neuroshard.cost_models.comms import BandwidthCommsModel
from torchrec_neuroshard.cost_models.loading import load_comms_model, load_cost_model
from torchrec_neuroshard.devices import BACKENDS
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.files import check_folder, from_options
from torchrec_neuroshard.placement import ShardingTask
from torchrec_neuroshard.progress import phase
from torchrec_neuroshard.records import command_line
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.workloads import generate_dlrm_tables, load_json

__all__ = [
    "PolicyRun",
    "add_arguments",
    "policy_card",
    "read_tables",
    "run",
    "train_policy",
]

_PAPERS = {
    "dreamshard": "DreamShard (NeurIPS 2022, arXiv 2210.02023)",
    "autoshard": "AutoShard (KDD 2022, arXiv 2208.06399)",
}
_CONFIGS: Mapping[str, type[PolicyConfig]] = {
    "dreamshard": DreamShardConfig,
    "autoshard": AutoShardConfig,
}
_PAPER_TRAINING: Mapping[str, Mapping[str, Any]] = {
    "dreamshard": {
        "batch_sizes": 65_536,
        "world_sizes": "4",
        "widths": "16, all tables",
        "num_tasks": 50,
        **{
            name: getattr(DreamShardConfig(), name)
            for name in (
                "iterations",
                "plans_per_iteration",
                "cost_updates",
                "policy_updates",
                "episodes",
            )
        },
    },
    "autoshard": {
        "batch_sizes": 65_536,
        "world_sizes": "8",
        "widths": "16 or 32",
        "num_tasks": 1,
        **{
            name: getattr(AutoShardConfig(), name)
            for name in ("iterations", "steps", "cost_updates", "buffer")
        },
    },
}
"""What the papers' released code does, beside what was done here."""
_LINK_GB_PER_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRun:
    """One training run."""

    method: str
    """`dreamshard` or `autoshard`."""
    cost_model: str
    """As for `load_cost_model`."""
    device_type: str = "cpu"
    gb_per_s: float | None = None
    """Of links, in place of the cost model's collectives; None takes these, and where
    none are known TorchRec's default within a node."""
    method_settings: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Those that differ from the method's config; none are the paper's."""
    num_tasks: int = 200
    """Tasks to train on, drawn from half of the tables."""
    num_test_tasks: int = 100
    """Tasks to judge by, drawn from the other half."""
    tasks: PolicyTaskConfig = dataclasses.field(default_factory=PolicyTaskConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in _PAPERS:
            raise ConfigError(
                f"unknown method '{self.method}'; one of {', '.join(sorted(_PAPERS))}"
            )
        known = {f.name for f in dataclasses.fields(_CONFIGS[self.method])} - {"seed"}
        odd = sorted(set(self.method_settings) - known)
        if odd:
            raise ConfigError(
                f"{self.method} has no setting '{odd[0]}'; it has "
                f"{', '.join(sorted(known))}"
            )
        if min(self.num_tasks, self.num_test_tasks) < 1:
            raise ConfigError(
                "num_tasks and num_test_tasks must be at least 1, got "
                f"{self.num_tasks} and {self.num_test_tasks}"
            )

    def settings(self) -> dict[str, Any]:
        """JSON-ready settings."""
        return dataclasses.asdict(self)


def train_policy(
    run: PolicyRun,
    tables: Sequence[TableConfig],
    tables_name: str,
    out: Path,
    console: Console | None = None,
) -> list[Comparison]:
    """Train a policy on half of the tables, judge it on the other half, write it.

    An interrupted run goes on where it was when it is started again with the same
    settings; the weights are those of a run that was not interrupted.

    Args:
        run: What to do.
        tables: To draw tasks from.
        tables_name: What the card calls them.
        out: Folder of the policy.
        console: Where progress is shown.

    Returns:
        The policy against random placement and four greedies.

    Raises:
        ConfigError: A setting is out of range, or `out` holds another run's state.
        BundleError: The cost model cannot be used.
    """
    console = console or Console()
    costs = SimulatedPlans(
        load_cost_model(run.cost_model, device_type=run.device_type),
        lambda world_size: _comms_model(run, world_size),
    )
    # A table that no sample reads costs nothing, wherever it is: it teaches nothing.
    read = [t for t in tables if t.pooling_factor > 0]
    training, test = split_tables(read, run.seed)
    tasks = sample_policy_tasks(training, run.tasks, run.num_tasks)
    trainer, searcher_type = _trainer(run, tasks, costs)
    identity = run.settings() | {
        "trainer": trainer.settings(),
        "tables": _digest(read),
        "hardware": costs.cost_model.hardware,
    }
    seconds = _run(trainer, out, identity, console)
    comms_source = costs.comms_for(max(run.tasks.world_sizes)).source
    info = PolicyInfo(
        method=run.method,
        name=out.name,
        hardware=costs.cost_model.hardware,
        ranges=_ranges(tasks),
        trained_on={
            "tables": tables_name,
            "num_training_tables": len(training),
            "num_test_tables": len(test),
            "settings": run.settings(),
            "method": trainer.settings(),
            "compute_source": costs.cost_model.source,
            "comms_source": comms_source,
            "command": command_line(),
            "training_seconds": round(seconds, 1),
        },
    )
    policy = Policy(trainer.net.eval(), info)
    comparisons = _compare(run, searcher_type(policy), test, costs)
    save_policy(out, policy, policy_card(info, comparisons))
    finish_training(out)
    for c in comparisons:
        console.print(
            f"against {c.name}: {c.change:+.1%} ({c.low:+.1%} to {c.high:+.1%})"
        )
    console.print(f"wrote {out}")
    return comparisons


def _trainer(
    run: PolicyRun, tasks: Sequence[ShardingTask], costs: SimulatedPlans
) -> tuple[PolicyTrainer, type[PolicySearcher]]:
    given: dict[str, Any] = {"seed": run.seed, **run.method_settings}
    if run.method == "dreamshard":
        dream = DreamShardConfig(**given)
        return DreamShardTrainer(tasks, costs, dream), DreamShardSearcher
    auto = AutoShardConfig(**given)
    return AutoShardTrainer(tasks, costs, auto), AutoShardSearcher


def _run(
    trainer: PolicyTrainer, out: Path, identity: Mapping[str, Any], console: Console
) -> float:
    """Train; return the processor's seconds of all of it, by those of what was left."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[metrics]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        refresh_per_second=2,
    )
    of_training = phase("" if console.is_terminal else "training")
    with of_training as shown, progress:
        bar = progress.add_task(
            trainer.method, total=trainer.num_iterations, metrics=""
        )

        def report(iteration: int, metrics: Mapping[str, float]) -> None:
            text = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            progress.update(bar, completed=iteration + 1, metrics=text)
            if not console.is_terminal:
                total = trainer.num_iterations
                shown.text = f"training: {iteration + 1} of {total}  {text}".rstrip()

        start = time.process_time()
        first = run_training(trainer, out, identity, report)
        seconds = time.process_time() - start
    if first:
        console.print(f"went on from iteration {first}")
    return seconds * trainer.num_iterations / max(1, trainer.num_iterations - first)


def _compare(
    run: PolicyRun,
    searcher: PolicySearcher,
    tables: Sequence[TableConfig],
    costs: SimulatedPlans,
) -> list[Comparison]:
    tasks = sample_policy_tasks(tables, run.tasks, run.num_test_tasks)
    with phase("judging by other tables"):
        return compare(searcher, yardsticks(), tasks, costs)


def _comms_model(run: PolicyRun, world_size: int) -> CommsModel:
    """The bandwidth given, else measured or published collectives inside one node."""
    known = None
    if run.gb_per_s is None:
        known = load_comms_model(
            run.cost_model,
            device_type=run.device_type,
            world_size=world_size,
            local_world_size=world_size,
        )
    gb_per_s = run.gb_per_s or _LINK_GB_PER_S
    return known or BandwidthCommsModel(
        world_size=world_size,
        local_world_size=world_size,
        intra_gb_per_s=gb_per_s,
        inter_gb_per_s=gb_per_s,
        source=f"{gb_per_s:g} GB/s assumed, not measured",
    )


def _digest(tables: Sequence[TableConfig]) -> str:
    data = json.dumps([t.to_json() for t in tables], sort_keys=True)
    return hashlib.sha256(data.encode()).hexdigest()


def _ranges(tasks: Sequence[ShardingTask]) -> dict[str, tuple[float, float]]:
    values = {
        "num_tables": [len(t.tables) for t in tasks],
        "world_size": [t.world_size for t in tasks],
        "batch_size": [t.batch_size for t in tasks],
    }
    return {k: (float(min(v)), float(max(v))) for k, v in values.items()}


def policy_card(info: PolicyInfo, comparisons: Sequence[Comparison]) -> str:
    """Write the card of a placement policy in Markdown."""
    trained_on = info.trained_on
    settings = trained_on["settings"]
    lines = [
        f"# Placement policy `{info.name}`",
        "",
        f"{_PAPERS[info.method]}: places whole tables, one after another.",
        "",
        "| | |",
        "| --- | --- |",
        f"| costs of | {info.hardware} ({trained_on['compute_source']}) |",
        f"| collectives | {trained_on['comms_source']} |",
        f"| tables | {trained_on['tables']} |",
        f"| tables to train on, to judge by | {trained_on['num_training_tables']}, "
        f"{trained_on['num_test_tables']}; none in both |",
        f"| seed | {settings['seed']} |",
        "",
        "Training and judging rest on predicted costs; no plan was measured.",
        "",
        "## Counts, beside the paper's released code",
        "",
        "| | here | paper |",
        "| --- | --- | --- |",
    ]
    here = {**settings["tasks"], **settings, **trained_on["method"]}
    for name, paper in _PAPER_TRAINING[info.method].items():
        lines.append(f"| {name} | {_shown(here[name])} | {_shown(paper)} |")
    first = comparisons[0]
    lines += [
        "",
        "## On tasks of tables never seen in training",
        "",
        f"{settings['num_test_tasks']} tasks, drawn as the training tasks were. Change "
        "of the predicted iteration time against each yardstick's, in pairs: mean and "
        "95 % bootstrap interval (below 0: the policy is quicker). Balance is the "
        "least busy rank's compute over the busiest's. `greedy-cost` is not of the "
        "papers: largest predicted cost first, on the rank with the least.",
        "",
        "| against | change | 95 % interval | mean ms | balance | tasks | only policy "
        "places | only yardstick places |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {c.name} | {c.change:+.1%} | {c.low:+.1%} to {c.high:+.1%} | "
        f"{c.yardstick_ms:.1f} | {c.yardstick_balance:.2f} | {c.num_pairs} | "
        f"{c.num_infeasible} | {c.num_lost} |"
        for c in comparisons
    ]
    lines += [
        f"| (the policy) | | | {first.policy_ms:.1f} | {first.policy_balance:.2f} | "
        f"{first.num_pairs} | | |",
        "",
        "## Made by",
        "",
        f"- `{trained_on['command']}`",
    ]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard train-policy`."""
    tasks = PolicyTaskConfig()
    parser.add_argument("--method", choices=sorted(_PAPERS), required=True)
    parser.add_argument(
        "--cost-model", default="cpu", help="name or folder of a cost model"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the policy")
    parser.add_argument(
        "--tables",
        type=Path,
        help="JSON of table sets; default: generated like the DLRM dataset",
    )
    parser.add_argument("--workload", help="which set of --tables; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--set",
        type=_setting,
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="a setting of the method, such as iterations=30; default: the paper's",
    )
    parser.add_argument("--num-tasks", type=int, default=200, help="to train on")
    parser.add_argument("--num-test-tasks", type=int, default=100, help="to judge by")
    parser.add_argument(
        "--num-tables",
        type=int,
        nargs=2,
        metavar=("LEAST", "MOST"),
        default=tasks.num_tables,
        help="tables per task",
    )
    parser.add_argument("--world-sizes", type=int, nargs="+", default=tasks.world_sizes)
    parser.add_argument("--widths", type=int, nargs="+", default=tasks.widths)
    parser.add_argument(
        "--batch-sizes",
        type=int,
        nargs="+",
        default=tasks.batch_sizes,
        help="over all ranks",
    )
    parser.add_argument("--optimizers", nargs="+", default=tasks.optimizers)
    parser.add_argument(
        "--max-rows",
        type=int,
        nargs="+",
        default=tasks.max_rows,
        help="cut a task's longer tables to one of these",
    )
    parser.add_argument("--device-type", choices=tuple(BACKENDS), default="cpu")
    parser.add_argument(
        "--gb-per-s",
        type=float,
        help="of links, in place of the cost model's collectives",
    )


def _setting(text: str) -> tuple[str, float]:
    """Read NAME=NUMBER; whole numbers stay whole."""
    name, _, value = text.partition("=")
    try:
        return name, int(value)
    except ValueError:
        return name, float(value)


def run(args: argparse.Namespace) -> int:
    """Run `neuroshard train-policy`."""
    check_folder(args.out)
    tables, name = read_tables(args.tables, args.workload, args.seed)
    settings = from_options(
        PolicyRun,
        args,
        method_settings=dict(args.set),
        tasks=from_options(PolicyTaskConfig, args),
    )
    train_policy(settings, tables, name, args.out)
    return 0


def read_tables(
    path: Path | None, workload: str | None, seed: int
) -> tuple[tuple[TableConfig, ...], str]:
    """Return tables to draw tasks from, and what they are called.

    Args:
        path: JSON of table sets; None generates some like the DLRM dataset.
        workload: Which set of the file; None is all.
        seed: Of the generator.

    Raises:
        ConfigError: There is no such set.
    """
    if path is None:
        if workload is not None:
            raise ConfigError("--workload names a set of --tables; give --tables too")
        return generate_dlrm_tables(seed), "generated like the DLRM dataset"
    sets = load_json(path)
    if workload is None:
        return tuple(t for s in sets.values() for t in s), path.name
    if workload not in sets:
        raise ConfigError(
            f"{path} has no workload '{workload}'; it has {', '.join(sets)}"
        )
    return sets[workload], f"{workload} of {path.name}"
