"""How long the report's page takes to open, and pictures of it for the documentation.

    python benchmarks/bench_page.py --out benchmarks/results/page_202611
    python benchmarks/bench_page.py --screenshots docs/images

The first plans a large model, writes its pages and opens each in a Chromium of its own,
`--starts` times; the second runs the README's quick start and takes pictures of its
pages, light and dark.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import json
import logging
import os
import re
import resource
import statistics
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from harness.browser import open_page
from harness.options import option, read_options
from harness.provenance import describe_run, keep_rows
from torchrec_neuroshard import NeuroShardPlanner, SearchConfig, topology_for
from torchrec_neuroshard.cli import main as neuroshard
from torchrec_neuroshard.report import PlanComparison, PlanReport, write_html
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.workloads.dlrm_dataset import generate_dlrm_tables

_RANKS_PER_NODE = 8
_BATCH_SIZE = 4_096
_CLOCK = """
addEventListener("load", () => {
  document.body.getBoundingClientRect(); // style and layout are done after this
  const { navigationStart, loadEventStart } = performance.timing;
  document.title = JSON.stringify({
    loaded_ms: loadEventStart - navigationStart,
    laid_out_ms: performance.now(),
  });
});
"""
_SHOTS = {"plan": (1100, 1480), "comparison": (1100, 765)}
"""Page -> width and height of its picture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageRun:
    tables: int = option(2_000, "of the large model", 60)
    nodes: int = option(16, "of eight H100 for it", 2)
    starts: int = option(9, "of the browser, for each page", 2)
    seconds: float = option(10.0, "that the search takes", 1.0)
    out: str = option("", "path of the results, without suffix")
    screenshots: str = option("", "folder for pictures, instead of timings")


def draw_tables(count: int) -> list[TableConfig]:
    """Return tables that follow the DLRM dataset's published aggregates."""
    found: list[TableConfig] = []
    while len(found) < count:
        drawn = generate_dlrm_tables(seed=len(found))
        wanted = min(count - len(found), len(drawn))
        found += drawn[:: len(drawn) // wanted][:wanted]
    return [dataclasses.replace(t, name=f"t{i}") for i, t in enumerate(found)]


def plan(
    run: PageRun, tables: Sequence[TableConfig], nodes: int
) -> tuple[PlanReport, PlanComparison]:
    """Plan for H100s, beside a plan of whole tables alone."""
    model = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=t.name,
                num_embeddings=t.num_embeddings,
                embedding_dim=t.embedding_dim,
                feature_names=[t.name],
            )
            for t in tables
        ],
        device=torch.device("meta"),
    )
    sharders = [EmbeddingBagCollectionSharder()]
    topology = topology_for("h100", num_nodes=nodes, ranks_per_node=_RANKS_PER_NODE)

    def constraints(types: list[str] | None) -> dict[str, ParameterConstraints]:
        return {
            t.name: ParameterConstraints(
                sharding_types=types,
                min_partition=32,
                pooling_factors=[t.pooling_factor],
            )
            for t in tables
        }

    def make_planner(types: list[str] | None) -> NeuroShardPlanner:
        return NeuroShardPlanner(
            topology=topology,
            batch_size=_BATCH_SIZE,
            constraints=constraints(types),
            profiles={t.name: t.profile for t in tables if t.profile is not None},
            search=SearchConfig(time_budget_seconds=run.seconds),
        )

    planner = make_planner(None)
    planner.plan(model, sharders)
    whole = make_planner(["table_wise"]).plan(model, sharders)
    return planner.report(), planner.compare(whole, model, sharders, "whole tables")


def in_rows(report: PlanReport) -> PlanReport:
    """Return the report with every table on every rank: as many shards as can be."""
    return dataclasses.replace(
        report,
        tables=tuple(
            dataclasses.replace(
                table,
                sharding_type="row_wise",
                shards=tuple(
                    dataclasses.replace(
                        table.shards[0],
                        rank=rank.rank,
                        compute_ms=table.shards[0].compute_ms * (1 + rank.rank / 997),
                    )
                    for rank in report.ranks
                ),
            )
            for table in report.tables
        ),
    )


def opened(path: Path) -> dict[str, float]:
    """Open a page with a clock in it; returns what that reads [ms], CPU and load."""
    text = path.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(_CLOCK.encode()).digest()).decode()
    text = text.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    timed = path.with_name(f"timed_{path.name}")
    timed.write_text(
        text.replace("</body>", f"<script>{_CLOCK}</script></body>"), encoding="utf-8"
    )
    load, before = os.getloadavg()[0], cpu_seconds()
    dom, said = open_page(timed)
    title = re.search(r"<title>(\{.*?\})</title>", dom)
    if said or title is None:
        raise RuntimeError(f"the page does not open: {said or 'no time in it'}")
    return {
        **json.loads(html.unescape(title[1])),
        "cpu_seconds": cpu_seconds() - before,
        "load_average": load,
    }


def cpu_seconds() -> float:
    """Return what child processes that have ended took of the processor."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def page(settings: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    lines = [
        "# How long the report's page takes to open",
        "",
        "| page | MB | shards | laid out [ms], median (range) | CPU [s] | load |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        out = [start["laid_out_ms"] for start in row["starts"]]
        cpu, load = (
            statistics.median(start[name] for start in row["starts"])
            for name in ("cpu_seconds", "load_average")
        )
        lines.append(
            f"| {row['page']} | {row['bytes'] / 1e6:.2f} | {row['shards']:,} | "
            f"{statistics.median(out):.0f} ({min(out):.0f} to {max(out):.0f}) | "
            f"{cpu:.2f} | {load:.1f} |"
        )
    lines += [
        "",
        f"{settings['tables']:,} tables on {settings['ranks']} ranks; each of "
        f"{len(rows[0]['starts'])} starts is a new headless Chromium with an empty "
        "profile and the file on disk. Times begin with the navigation and end when "
        "everything shown after the load event has its place; painting is not in "
        "them. CPU: of the whole browser, from its start to its end. *Every table in "
        "rows* is made up of the plan: each table has a shard on every rank.",
        "",
        f"{settings['hardware']['device']}, {os.cpu_count()} cores that other work "
        f"shares: its load average stands above; {settings['date']}, commit "
        f"{settings['commit']}. Command: `{settings['command']}`",
        "",
    ]
    return "\n".join(lines)


def measure(run: PageRun, folder: Path) -> None:
    report, compared = plan(run, draw_tables(run.tables), run.nodes)
    pages: dict[str, PlanReport | PlanComparison | None] = {
        "nothing, to compare with": None,
        "a plan": report,
        "two plans": compared,
        "every table in rows": in_rows(report),
    }
    settings = {
        **describe_run(),
        "tables": len(report.tables),
        "ranks": len(report.ranks),
    }
    rows: list[dict[str, Any]] = []
    for name, shown in pages.items():
        path = folder / "page.html"
        both: list[PlanReport] = []
        if shown is None:
            path.write_text("<!DOCTYPE html><title></title><body></body>")
        else:
            write_html(shown, path)
            both = (
                [shown.first, shown.second]
                if isinstance(shown, PlanComparison)
                else [shown]
            )
        rows.append(
            {
                "page": name,
                "bytes": path.stat().st_size,
                "shards": sum(len(t.shards) for r in both for t in r.tables),
                "starts": [opened(path) for _ in range(run.starts)],
            }
        )
        keep_rows(Path(run.out) if run.out else None, settings, rows, page)
    print(page(settings, rows))


def quick_start() -> list[str]:
    """Return what the README's first command plans, as `neuroshard` takes it."""
    readme = Path(__file__).parents[1] / "README.md"
    found = re.search(
        r"^neuroshard (plan .*?)( --compare.*)?$", readme.read_text(), re.M
    )
    assert found is not None, "the README begins with a plan"
    return found[1].split()


def take_pictures(run: PageRun, folder: Path) -> None:
    out = Path(run.screenshots)
    for name, options in (("plan", []), ("comparison", ["--compare"])):
        page = str(folder / f"{name}.html")
        neuroshard([*quick_start(), *options, "--html", page])
    out.mkdir(parents=True, exist_ok=True)
    for name, size in _SHOTS.items():
        for dark in (False, True):
            path = out / f"{name}_{'dark' if dark else 'light'}.png"
            open_page(folder / f"{name}.html", path, size, dark)
            with Image.open(path) as picture:
                picture.convert("RGB").quantize(128).save(path, optimize=True)
            print(f"wrote {path}: {path.stat().st_size / 1e3:.0f} kB")


def main(arguments: Sequence[str] | None = None) -> int:
    run = read_options(PageRun, arguments, __doc__ or "")
    logging.disable(logging.WARNING)  # TorchRec's notices about its own code
    warnings.simplefilter("ignore")  # reports hold the planner's
    with tempfile.TemporaryDirectory() as folder:
        (take_pictures if run.screenshots else measure)(run, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
