"""`neuroshard diff`: what moved from one plan file to another, and what it saves."""

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
    parser.add_argument("first", type=Path, help="file that save_plan wrote")
    parser.add_argument("second", type=Path, help="another one, of the same tables")
    parser.add_argument("--html", type=Path, help="write it there as a page, too")
    parser.add_argument("--json", type=Path, help="write it there as JSON, too")


def run(args: argparse.Namespace) -> int:
    """Compare the plans.

    Raises:
        PlanFileError: A file cannot be used, or they are plans of other tables.
    """
    check_outputs(args.html, args.json, read=(args.first, args.second))
    names = str(args.first), str(args.second)
    with phase("comparing the plans"):
        found = read_plan(args.first).compared_to(read_plan(args.second), names)
    print(found)
    with phase("writing"):
        if args.html:
            write_html(found, args.html, " and ".join(names))
        if args.json:
            write_json(found.to_json(), args.json)
    return 0
