"""Options that several subcommands share, and the files that they name.

An option has the same name, unit and default in every subcommand.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from torchrec_neuroshard.costs.schedules import SCHEDULES
from torchrec_neuroshard.errors import suggestion
from torchrec_neuroshard.files import check_outputs, json_text, write_whole
from torchrec_neuroshard.progress import phase
from torchrec_neuroshard.report import write_html

_MOST_RANKS = 65_536
"""More than any job has. A mistyped number must not fill this machine's memory."""


def option(
    parser: Any, name: str, kind: Any, text: str, default: Any = None, **others: Any
) -> None:
    """Declare an option; its help ends with its default.

    Args:
        parser: The subcommand's, or a group of its options.
        name: The option, with its dashes.
        kind: Reads the value.
        text: The help text.
        default: None for no default, or where `text` says what happens.
        others: More arguments of `add_argument`.
    """
    if default not in (None, (), []):
        text += " (default %(default)s)"
    parser.add_argument(name, type=kind, help=text, default=default, **others)


def examples(parser: argparse.ArgumentParser, *lines: str) -> None:
    """Show examples at the end of a subcommand's help, without "neuroshard"."""
    parser.epilog = "\n  neuroshard ".join(["examples:", *lines])


def flag(parser: Any, name: str, text: str) -> None:
    """Declare an option without a value."""
    parser.add_argument(name, action="store_true", help=text)


def whole(least: int = 1, most: int | None = None) -> Callable[[str], int]:
    """Return a reader of whole numbers from `least` to `most`."""

    def parse(text: str) -> int:
        hint = "; 'neuroshard sweep' takes several" if "," in text else ""
        value: int = _parsed(int, text, "a whole number", hint)
        if value < least:
            raise ArgumentTypeError(f"must be at least {least}, got {value}")
        if most is not None and value > most:
            raise ArgumentTypeError(f"must be at most {most:,}, got {value:,}")
        return value

    return parse


def number(*, zero: bool = False) -> Callable[[str], float]:
    """Return a reader of finite numbers above 0, or from 0 on."""

    def parse(text: str) -> float:
        hint = "; leave out the unit" if text[:1].isdigit() else ""
        value: float = _parsed(float, text, "a number", hint)
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            rule = "at least 0" if zero else "above 0"
            raise ArgumentTypeError(f"must be finite and {rule}, got {text:.60}")
        return value

    return parse


def names(text: str) -> list[str]:
    """Read names with commas between them."""
    return [name for part in text.split(",") if (name := part.strip())]


def share(text: str) -> float:
    """Read a share, from 0 to below 1."""
    value = number(zero=True)(text)
    if value >= 1:
        raise ArgumentTypeError(f"must be below 1, got {text:.60}; 0.15 are 15 %")
    return value


def _parsed(kind: type[Any], text: str, wanted: str, hint: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ArgumentTypeError(f"'{text:.60}' is not {wanted}{hint}") from None


def one_of(names: Collection[str], kind: str) -> Callable[[str], str]:
    """Return a reader of one of these names; `kind` is their noun, in the plural."""

    def parse(text: str) -> str:
        if text not in names:
            near = suggestion(text, names, kind)
            raise ArgumentTypeError(f"'{text:.60}' is not one of the {kind}; {near}")
        return text

    return parse


def list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return a reader of values with commas between them; doubles count once."""

    def parse(text: str) -> list[Any]:
        parts = [part.strip().lower() for part in text.split(",")]
        if found := list(dict.fromkeys(kind(part) for part in parts if part)):
            return found
        raise ArgumentTypeError("is empty; separate values by commas")

    return parse


def add_model(parser: argparse.ArgumentParser) -> Any:
    """Declare the model to plan, its sequences and its training pipeline.

    Returns:
        The group of these options.
    """
    group = parser.add_argument_group("model")
    group.add_argument(
        "model",
        help="a .json, .yaml or .csv file of tables, or - for standard input; or "
        "package.module:function, which returns the model, best on the meta device, or "
        "(model, sharders, constraints)",
    )
    text = "tables of the file whose rows are not pooled, separated by commas"
    option(group, "--sequences", names, text, (), metavar="TABLES")
    known = list(SCHEDULES)
    text = f"TorchRec's training pipeline: {', '.join(known)}"
    kind = one_of(known, "training pipelines")
    option(group, "--pipeline", kind, text, metavar="NAME")
    return group


def add_planner(parser: argparse.ArgumentParser, seconds: float, what: str) -> Any:
    """Declare the model, and what else the planner takes.

    Args:
        parser: The subcommand's.
        seconds: The default of `--seconds`.
        what: What these seconds are for.

    Returns:
        The group of costs and search.
    """
    model = add_model(parser)
    text = "how ids repeat: a file from 'neuroshard profile'"
    option(model, "--profiles", Path, text, metavar="FILE")
    text = "TorchRec's constraints: a JSON or YAML file, table (* for all) -> fields"
    option(model, "--constraints", Path, text, metavar="FILE")
    text = "milliseconds of the other layers in an iteration"
    option(model, "--dense-ms", number(zero=True), text, metavar="MS")
    group = parser.add_argument_group("costs and search")
    text = "auto, the name of a shipped bundle or card, or the folder of a bundle"
    option(group, "--cost-model", str, text, "auto", metavar="NAME")
    text = f"time budget of {what} in seconds (default {seconds:g})"
    option(group, "--seconds", number(), text)
    return group


def add_devices(
    parser: argparse.ArgumentParser, *, many: bool = False, ranks: str = "8"
) -> None:
    """Declare the devices and the batch.

    Args:
        parser: The subcommand's.
        many: Whether cards, ranks and batches are lists.
        ranks: The default number of ranks.
    """
    some = list_of if many else lambda kind: kind
    also = "; several, separated by commas" if many else ""
    group = parser.add_argument_group("devices")
    text = f"h100, a100, ... or cpu{also}"
    option(group, "--card", some(str), text, "h100")
    count = some(whole(1, _MOST_RANKS))
    option(group, "--ranks", count, f"number of ranks{also}", ranks, metavar="N")
    text = "ranks per node (default: a node of this card as sold; all CPU ranks)"
    option(group, "--ranks-per-node", whole(), text, metavar="N")
    text = f"samples per rank{also} (TorchRec's default, 512)"
    option(group, "--batch-size", some(whole()), text, metavar="N")
    text = "memory of a GPU in GB (default: as sold)"
    option(group, "--memory-gb", number(), text, metavar="GB")
    text = "memory of a node's host in GB (default: TorchRec's 137 GB per rank)"
    option(group, "--host-memory-gb", number(), text, metavar="GB")
    text = "bandwidth of a rank to the others of its node, one way in GB/s"
    option(group, "--intra-gb-per-s", number(), text, metavar="GB/S")
    text = "bandwidth of a rank to other nodes, one way in GB/s"
    option(group, "--inter-gb-per-s", number(), text, metavar="GB/S")
    text = "share of a rank's memory to keep free (TorchRec's default, 0.15)"
    option(group, "--reserve", share, text, metavar="SHARE")


def add_outputs(parser: argparse.ArgumentParser) -> Any:
    """Declare the detail of the printed report, and the files to write it to.

    Returns:
        The group of these options.
    """
    group = parser.add_argument_group("output")
    text = "print all ranks and tables, and the source of each figure"
    flag(group, "--verbose", text)
    text = "write the report as a page; - prints it"
    option(group, "--html", Path, text, metavar="FILE")
    text = "write the report as JSON; - prints it"
    option(group, "--json", Path, text, metavar="FILE")
    return group


def add_bundle(parser: argparse.ArgumentParser) -> None:
    """Declare the bundle to write, and the seed that it depends on."""
    text = "folder for the bundle; its name becomes the bundle's"
    option(parser, "--out", Path, text, required=True, metavar="FOLDER")
    option(parser, "--seed", whole(0), "random seed", 0)


def add_measuring(parser: Any, num_sets: int) -> None:
    """Declare which kernels to measure, and for how long.

    Args:
        parser: The subcommand's, or a group of its options.
        num_sets: The default number of table sets.
    """
    text = "table sets to measure; a fifth of them test the model"
    option(parser, "--num-sets", whole(), text, num_sets, metavar="N")
    text = "cpu or cuda[:N] (default: a GPU where there is one)"
    option(parser, "--device", str, text)
    text = "largest set in GiB (default: by the device's memory)"
    option(parser, "--max-gib", number(), text, metavar="GIB")
    add_time_budget(parser)


def add_time_budget(parser: Any, default: float | None = None) -> None:
    """Declare when a command that measures stops."""
    text = "stop after this many seconds; the same command continues"
    parser.add_argument(
        "--seconds",
        "--time-limit",  # the spelling in the commands of shipped cards
        type=number(),
        help=text if default is None else f"{text} (default {default:g})",
        default=default,
        dest="time_budget_seconds",
        metavar="SECONDS",
    )


def loading() -> contextlib.AbstractContextManager[object]:
    """Show that a command imports torch and torchrec, which takes seconds."""
    return phase("loading torch and torchrec")


_OUTPUTS = ("out", "html", "json", "csv")


def check_files(args: argparse.Namespace, *read: str) -> None:
    """Check before the work starts that its files can be written.

    Args:
        args: The options.
        read: Names of options whose files are read.

    Raises:
        ConfigError: A file cannot be written, or is also read.
    """
    found = [getattr(args, name) for name in read]
    if "model" in args:
        file, _, workload = args.model.rpartition(":")
        found.append(file or workload)
    check_outputs(*(getattr(args, name, None) for name in _OUTPUTS), read=found)


def show(args: argparse.Namespace, *reports: Any, more_follows: bool = False) -> None:
    """Print reports, in the detail that --verbose asks for; skips None.

    Args:
        args: The options.
        reports: Reports, or their texts.
        more_follows: Whether another call prints more; the last one names --verbose.
    """
    shown = [
        each.text(args.verbose, more="") if hasattr(each, "text") else each
        for each in reports
    ]
    more = None if args.verbose else "For details, add --verbose."
    if more_follows:
        more = ""
    print(*filter(None, [*shown, more]), sep="\n\n", flush=True)
    if more_follows:
        print()


def write_outputs(
    args: argparse.Namespace, shown: Any, title: str = "", data: Any = None
) -> None:
    """Write a report to the files that the options name, and print their names.

    Args:
        args: The options.
        shown: The report.
        title: The page's title.
        data: The JSON; None writes the report's.
    """
    files = {name: getattr(args, name, None) for name in _OUTPUTS}
    with phase("writing"):
        if files["html"]:
            write_html(shown, files["html"], title, args.typed)
        if files["json"]:
            write_whole(files["json"], json_text(data or shown.to_json()))
        if files["csv"]:
            write_whole(files["csv"], shown.to_csv())
    for path in files.values():
        tell_written(path)


def tell_written(path: Path | None) -> None:
    """Print that a file was written; "-" is standard output."""
    if path is not None and path.name != "-":
        print(f"wrote {path}")
