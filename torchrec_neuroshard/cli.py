"""The `neuroshard` command: picks a subcommand, and loads only that one.

A subcommand `x` is a line in `COMMANDS` and two functions of the module named there:
`add_x(parser)`, and `run_x(args) -> int`. No other module is imported, so that a broken
or missing framework never keeps `neuroshard doctor` from running.

Exit codes: 0 done; 1 no plan fits, or a rank cannot run it; 2 something that
was given cannot be used; 3 torch, fbgemm and torchrec are missing or do not fit
together; 70 a fault of our own; 130 interrupted; 141 nobody reads the output any more.
Scripts rely on them: see docs/job_gate.md.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchrec_neuroshard import __version__, progress
from torchrec_neuroshard.errors import (
    EnvironmentMismatchError,
    InfeasibleError,
    NeuroShardError,
)

__all__ = ["COMMANDS", "Command", "main"]

_STARTED = time.monotonic()
"""When this process began: before torch and fbgemm, which take seconds to import."""

EXIT_NO_PLAN = 1
EXIT_USER_ERROR = 2
EXIT_BROKEN_ENVIRONMENT = 3
EXIT_FAULT = 70
"""As in BSD's sysexits; Python's own 1 would read as "no plan fits"."""
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141


class Command(NamedTuple):
    """One subcommand."""

    name: str
    module: str
    help: str


COMMANDS = (
    Command(
        "doctor",
        ".hardware.doctor",
        "check that torch, fbgemm and torchrec fit together",
    ),
    Command("collect", ".commands.measure", "measure kernels and collectives here"),
    Command("train", ".commands.bundles", "train a cost model on measurements"),
    Command(
        "calibrate",
        ".commands.bundles",
        "fit a cost model to this machine with a few measurements",
    ),
    Command("cache", ".commands.bundles", "list or delete what jobs measured at start"),
    Command("plan", ".commands.plan", "plan a model or a file of tables"),
    Command("profile", ".commands.profile", "profile the ids of a data set"),
    Command("show", ".commands.stored", "show a stored plan"),
    Command("diff", ".commands.stored", "say what moved between two stored plans"),
    Command("sweep", ".commands.plan", "predict many cards, ranks and batches"),
    Command("rehearse", ".commands.stored", "build every rank of a stored plan"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: the arguments after the program's name; `sys.argv[1:]` when None.

    Returns:
        The exit code. Errors of this package, frameworks that do not load and files
        that cannot be read or written end in a message on stderr, a fault of our own in
        a traceback. With the environment variable NEUROSHARD_DEBUG=1 every error has
        one, to show where it came from. SIGTERM interrupts as Ctrl-C does.

    Raises:
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
            traceback.print_exc()
        if reason is None:
            return EXIT_FAULT
        print(f"neuroshard: error: {reason}", file=sys.stderr)
        if isinstance(reason, InfeasibleError):
            return EXIT_NO_PLAN
        if isinstance(reason, EnvironmentMismatchError):
            return EXIT_BROKEN_ENVIRONMENT
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
    module, options = None, parser.format_help()
    for name, where, text in COMMANDS:
        subparser = subparsers.add_parser(name, help=text, description=_sentence(text))
        if name == chosen:
            with progress.phase("loading torch and torchrec"):
                module = importlib.import_module(where, __package__)
                getattr(module, f"add_{name}")(subparser)
            options = subparser.format_help()
    args, unknown = parser.parse_known_args(
        arguments, argparse.Namespace(started=_STARTED)
    )
    if unknown:
        known = re.findall(r"--[a-z][a-z-]+", options)
        near = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if module is None:
        parser.print_help(sys.stderr)
        return EXIT_USER_ERROR
    code: int = getattr(module, f"run_{chosen}")(args)
    return code


def _explain(error: Exception) -> Exception | str | None:
    """The error to show a user; None for a fault of our own."""
    if isinstance(error, NeuroShardError):
        return error
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: '{error.filename}'"
    from torchrec_neuroshard.hardware.doctor import explain_failure

    return explain_failure("this command", error)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
