"""`neuroshard cache`: what first launches have measured; list, show, clear."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.markdown import Markdown

from torchrec_neuroshard.cost_models import cache
from torchrec_neuroshard.cost_models.bundle import COMMS_BUNDLE, COMPUTE_BUNDLE
from torchrec_neuroshard.errors import ConfigError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard cache`."""
    parser.add_argument(
        "action",
        nargs="?",
        default="list",
        choices=("list", "show", "clear"),
        help="list all bundles, show what is known of one, or delete (default: list)",
    )
    parser.add_argument("name", nargs="?", help="of one bundle, as listed")


def _named(name: str) -> cache.CacheEntry:
    found = cache.entries()
    for entry in found:
        if entry.folder.name == name:
            return entry
    raise ConfigError(
        f"the cache {cache.cache_folder()} has no bundle '{name}'; it has "
        f"{', '.join(e.folder.name for e in found) or 'none'}"
    )


def _line(entry: cache.CacheEntry) -> str:
    key = entry.key
    what = "kernels and collectives" if entry.has_collectives else "kernels"
    return (
        f"{entry.folder.name}: {what} of {key.world_size} x {key.device} "
        f"({key.local_world_size} a node), {', '.join(key.optimizers)}, "
        f"{', '.join(key.data_types)}; torch {key.torch}, fbgemm {key.fbgemm}, "
        f"torchrec {key.torchrec}; {entry.created}, {entry.seconds:.0f} s, "
        f"{entry.num_bytes() / 2**20:.1f} MiB"
    )


def _show(entry: cache.CacheEntry, console: Console) -> None:
    console.print(_line(entry), soft_wrap=True, highlight=False)
    console.print(f"cost_model='{entry.folder}'", soft_wrap=True, highlight=False)
    for card in (COMPUTE_BUNDLE.card_name, COMMS_BUNDLE.card_name):
        path = entry.folder / card
        if path.is_file():
            console.print(Markdown(path.read_text(encoding="utf-8")))


def run(args: argparse.Namespace) -> int:
    """Run `neuroshard cache`."""
    console = Console()
    if args.action == "show":
        if args.name is None:
            raise ConfigError("which one? 'neuroshard cache' lists the bundles")
        _show(_named(args.name), console)
    elif args.action == "clear":
        if args.name is not None:
            _named(args.name)
        deleted = cache.clear(args.name)
        console.print(f"{len(deleted)} bundles deleted from {cache.cache_folder()}")
    else:
        found = cache.entries()
        for entry in found:
            console.print(_line(entry), soft_wrap=True, highlight=False)
        if not found:
            console.print(f"{cache.cache_folder()} holds no bundles", soft_wrap=True)
    return 0
