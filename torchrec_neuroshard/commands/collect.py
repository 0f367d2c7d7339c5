"""`neuroshard collect`: choose what to measure."""

from __future__ import annotations

import argparse
import importlib

from torchrec_neuroshard.progress import phase

__all__ = ["add_arguments", "run"]

_KINDS = {
    "compute": "forward and backward of fused embedding kernels",
    "comms": "collectives between ranks; start it with torchrun",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare one subcommand per kind of measurement."""
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind, text in _KINDS.items():
        module = importlib.import_module(f"torchrec_neuroshard.collect.{kind}")
        module.add_arguments(kinds.add_parser(kind, help=text))


def run(args: argparse.Namespace) -> int:
    """Run the chosen kind."""
    module = importlib.import_module(f"torchrec_neuroshard.collect.{args.kind}")
    with phase("measuring"):  # until bars say more
        code: int = module.run(args)
    return code
