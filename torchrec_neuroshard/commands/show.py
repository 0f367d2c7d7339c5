"""`neuroshard show`: what a plan file holds."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchrec_neuroshard.commands.plan import write_json
from torchrec_neuroshard.files import check_outputs
from torchrec_neuroshard.plans.plan_files import read_plan
from torchrec_neuroshard.progress import phase
from torchrec_neuroshard.report import write_html

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("plan", type=Path, help="file that save_plan wrote")
    parser.add_argument("--html", type=Path, help="write it there as a page, too")
    parser.add_argument("--json", type=Path, help="write it there as JSON, too")


def run(args: argparse.Namespace) -> int:
    """Show the plan.

    Raises:
        PlanFileError: The file cannot be used.
    """
    check_outputs(args.html, args.json, read=(args.plan,))
    with phase("reading the plan"):
        stored = read_plan(args.plan)
        report = stored.report()
    print(f"{args.plan}: {stored.made_for}")
    print(report)
    with phase("writing"):
        if args.html:
            write_html(report, args.html, f"Plan {args.plan}")
        if args.json:
            write_json(report.to_json(), args.json)
    return 0
