"""`neuroshard cache`: list or delete what first launches have measured."""

from __future__ import annotations

import argparse

from rich.console import Console

from torchrec_neuroshard.cost_models import cache

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard cache`."""
    parser.add_argument(
        "action",
        nargs="?",
        default="list",
        choices=("list", "clear"),
        help="list all bundles, or delete them (default: list)",
    )


def _line(entry: cache.CacheEntry) -> str:
    key = entry.key
    return (
        f"{entry.folder.name}: {key.world_size} x {key.device} "
        f"({key.local_world_size} a node), {', '.join(key.optimizers)}, "
        f"{', '.join(key.data_types)}; torch {key.torch}, fbgemm {key.fbgemm}, "
        f"torchrec {key.torchrec}; {entry.created}, {entry.seconds:.0f} s; "
        f"cost_model='{entry.folder}'"
    )


def run(args: argparse.Namespace) -> int:
    """Run `neuroshard cache`."""
    console = Console()
    found = cache.entries()
    if args.action == "clear":
        deleted = cache.clear()
        console.print(f"{deleted} bundles deleted from {cache.cache_folder()}")
        return 0
    for entry in found:
        console.print(_line(entry), soft_wrap=True, highlight=False)
    if not found:
        console.print(f"{cache.cache_folder()} holds no bundles", soft_wrap=True)
    return 0
