"""The `neuroshard` command: picks a subcommand, and loads only that one.

A subcommand is a module with `add_arguments(parser)` and `run(args) -> int`, and
one line in `COMMANDS`. No other subcommand's module is imported, so that a broken
or missing framework never keeps `neuroshard doctor` from running.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, cast

from torchrec_neuroshard import __version__, progress
from torchrec_neuroshard.errors import NeuroShardError

__all__ = ["COMMANDS", "Command", "main"]

_STARTED = time.monotonic()
"""When this process began: before torch and fbgemm, which take seconds to import."""

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141


class Command(NamedTuple):
    """One subcommand."""

    name: str
    help: str
    module: str


COMMANDS = (
    Command(
        "doctor",
        "check that torch, fbgemm and torchrec belong together",
        "torchrec_neuroshard.doctor",
    ),
    Command(
        "collect",
        "measure embedding kernels and collectives on this machine",
        "torchrec_neuroshard.commands.collect",
    ),
    Command(
        "train",
        "train a cost model on collected measurements",
        "torchrec_neuroshard.training.train_cli",
    ),
    Command(
        "calibrate",
        "fit a cost model to this machine with a few measurements",
        "torchrec_neuroshard.training.calibrate_cli",
    ),
    Command(
        "cache",
        "list or delete what first launches have measured",
        "torchrec_neuroshard.commands.cache",
    ),
    Command(
        "plan",
        "plan a model or a file of tables for any devices",
        "torchrec_neuroshard.commands.plan",
    ),
    Command(
        "profile",
        "profile the ids of a data set",
        "torchrec_neuroshard.workloads.profile_cli",
    ),
    Command(
        "show",
        "show a stored plan",
        "torchrec_neuroshard.commands.show",
    ),
    Command(
        "diff",
        "say what moved between two stored plans",
        "torchrec_neuroshard.commands.diff",
    ),
    Command(
        "sweep",
        "foretell a model's cost on many cards, ranks and batches",
        "torchrec_neuroshard.commands.sweep",
    ),
    Command(
        "rehearse",
        "build every rank of a stored plan without its devices",
        "torchrec_neuroshard.commands.rehearse",
    ),
)


class _CommandModule(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: the arguments after the program's name; `sys.argv[1:]` when None.

    Returns:
        The exit code: the subcommand's own; 2 for a `NeuroShardError` or for
        frameworks that do not load and files that cannot be read or written, with a
        message on stderr; 130 when interrupted by Ctrl-C or SIGTERM; 141 when nobody
        reads the output any more.

    Raises:
        Exception: a fault of our own. With the environment variable
            NEUROSHARD_DEBUG=1 every error, to show where it came from.
        SystemExit: `--help`, `--version`, or arguments that do not parse.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with _interrupted_by_sigterm(), _phases_shown():
            code = _run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("neuroshard: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has seen enough; Python's last flush has no place.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED
    except Exception as error:
        reason = _explain(error)
        if reason is None or os.environ.get("NEUROSHARD_DEBUG") == "1":
            raise
        print(f"neuroshard: error: {reason}", file=sys.stderr)
        return EXIT_USER_ERROR


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM interrupt as Ctrl-C does, so that what was measured is kept."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python sets handlers in the main thread alone
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _phases_shown() -> contextlib.AbstractContextManager[None]:
    """Show phases, of commands that torchrun starts on one rank alone."""
    is_first = os.environ.get("RANK", "0") == "0"
    return progress.shown() if is_first else contextlib.nullcontext()


def _run(arguments: list[str]) -> int:
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    parser = argparse.ArgumentParser(
        prog="neuroshard",
        description="Shard TorchRec embedding tables by measured cost.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", metavar="command")
    module: _CommandModule | None = None
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name, help=command.help, description=_sentence(command.help)
        )
        if command.name == chosen:
            with progress.phase("loading torch and torchrec"):
                module = cast(_CommandModule, importlib.import_module(command.module))
                module.add_arguments(subparser)
    args = parser.parse_args(arguments, argparse.Namespace(started=_STARTED))
    if module is None:
        parser.print_help(sys.stderr)
        return EXIT_USER_ERROR
    return module.run(args)


def _explain(error: Exception) -> Exception | str | None:
    """The error to show a user; None for a fault of our own."""
    if isinstance(error, NeuroShardError):
        return error
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: '{error.filename}'"
    from torchrec_neuroshard.doctor import explain_failure

    return explain_failure("this command", error)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
