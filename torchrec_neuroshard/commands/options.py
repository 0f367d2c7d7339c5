"""Options that several subcommands share, and the files that they name.

An option has the same name, unit and default in every subcommand.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchrec_neuroshard.costs.schedules import SCHEDULES
from torchrec_neuroshard.files import check_outputs, json_text, write_whole
from torchrec_neuroshard.progress import phase


def option(
    parser: Any, name: str, kind: Any, text: str, default: Any = None, **others: Any
) -> None:
    """Declare an option; its help ends with its default.

    Args:
        parser: Of the subcommand, or a group of its options.
        name: With its dashes.
        kind: What reads its value.
        text: Its help.
        default: None: none, or `text` says what happens.
        others: Of `add_argument`.
    """
    if default not in (None, (), []):
        text += " (%(default)s)"
    parser.add_argument(name, type=kind, help=text, default=default, **others)


def list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return what reads a list of values with commas between them."""

    def parse(text: str) -> list[Any]:
        parts = [part.strip().lower() for part in text.split(",")]
        if found := list(dict.fromkeys(kind(part) for part in parts if part)):
            return found
        raise ValueError("it is empty")

    parse.__name__ = f"list of {kind.__name__}s, with commas between"
    return parse


def add_model(parser: argparse.ArgumentParser) -> None:
    """Declare the model to plan, and its training loop."""
    parser.add_argument(
        "model",
        help="package.module:function that returns the model, best on the meta device, "
        "or (model, sharders, constraints); or a file of tables: .json, .yaml or .csv",
    )
    known = list(SCHEDULES)
    option(parser, "--pipeline", str, "TorchRec's training pipeline", choices=known)


def add_planner(parser: argparse.ArgumentParser, seconds: float, what: str) -> None:
    """Declare the model and what the planner is to know of it.

    Args:
        parser: Of the subcommand.
        seconds: The default of `--seconds`.
        what: What these seconds are for.
    """
    add_model(parser)
    option(parser, "--profiles", Path, "how ids repeat: a file of 'neuroshard profile'")
    text = "JSON or YAML: table, or * for all -> TorchRec's constraints"
    option(parser, "--constraints", Path, text)
    text = "auto, a shipped bundle's or a card's name, or a bundle's folder"
    option(parser, "--cost-model", str, text, "auto")
    option(parser, "--dense-ms", float, "time of the other layers in an iteration [ms]")
    option(parser, "--seconds", float, f"seconds that {what} may take ({seconds:g})")


def add_devices(
    parser: argparse.ArgumentParser, *, many: bool = False, ranks: str = "8"
) -> None:
    """Declare the devices and the batch.

    Args:
        parser: Of the subcommand.
        many: Whether cards, ranks and batches are lists.
        ranks: The default number.
    """
    text, number, like = (
        (list_of(str), list_of(int), "; several with commas between")
        if many
        else (str, int, "")
    )
    option(parser, "--card", text, f"h100, a100, ... or cpu{like}", "h100")
    option(parser, "--ranks", number, f"ranks in all{like}", ranks)
    like_sold = "ranks of a node (as the card's nodes are sold; of CPUs all)"
    option(parser, "--ranks-per-node", int, like_sold)
    option(parser, "--memory-gb", float, "memory of a GPU [GB] (as sold)")
    option(parser, "--batch-size", number, f"samples per rank{like} (512)")


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Declare the files that a report is written to."""
    option(parser, "--html", Path, "write the report there, as a page")
    option(parser, "--json", Path, "write the report there, as JSON")


def add_bundle(parser: argparse.ArgumentParser) -> None:
    """Declare the bundle to write, and the seed of what makes it."""
    option(parser, "--out", Path, "folder of the bundle, which names it", required=True)
    option(parser, "--seed", int, "of all that is drawn", 0)


def add_measuring(parser: Any, num_sets: int) -> None:
    """Declare what is measured of kernels, and for how long.

    Args:
        parser: Of the subcommand, or a group of its options.
        num_sets: How many sets of tables by default.
    """
    option(parser, "--num-sets", int, "sets to measure, a fifth to judge by", num_sets)
    option(parser, "--device", str, "cpu or cuda[:N] (the GPU where there is one)")
    option(parser, "--max-gib", float, "GiB of a set, at most (by the device's memory)")
    add_time_limit(parser)


def add_time_limit(parser: Any, default: float | None = None) -> None:
    """Declare when a command that measures stops."""
    text = "seconds after which it stops; the same command goes on"
    field = "time_limit_seconds"
    option(parser, "--time-limit", float, text, default, dest=field)


_OUTPUTS = ("out", "html", "json", "csv")


def check_files(args: argparse.Namespace, *read: str) -> None:
    """Check the files to write, before the work that they are to hold is done.

    Args:
        args: The options.
        read: Names of options that are files to read.

    Raises:
        ConfigError: A file cannot be written, or is one that is read.
    """
    found = [getattr(args, name) for name in read]
    if "model" in args:
        file, _, workload = args.model.rpartition(":")
        found.append(file or workload)
    check_outputs(*(getattr(args, name, None) for name in _OUTPUTS), read=found)


def write_outputs(
    args: argparse.Namespace, shown: Any, title: str = "", data: Any = None
) -> None:
    """Write a report to the files that options name; say which have been written.

    Args:
        args: The options.
        shown: The report.
        title: Of its page.
        data: What the JSON holds; None: the report.
    """
    files = {name: getattr(args, name, None) for name in _OUTPUTS}
    with phase("writing"):
        if files["html"]:
            # Only here: some subcommands do without torch.
            from torchrec_neuroshard.report import write_html

            write_html(shown, files["html"], title)
        if files["json"]:
            write_whole(files["json"], json_text(data or shown.to_json()))
        if files["csv"]:
            write_whole(files["csv"], shown.to_csv())
    for path in filter(None, files.values()):
        print(f"wrote {path}")
