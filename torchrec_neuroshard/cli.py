"""The `neuroshard` command: picks a subcommand and loads only that one.

A subcommand `x` is a line in `COMMANDS` and two functions in the module named there:
`add_x(parser)` declares its options, and `run_x(args) -> int` runs it. Such a module
imports neither torch nor torchrec. `run_x` first reads and checks all files that the
options name (`commands.files`, `commands.options.check_files`), so that a mistake is
told at once. Only then, `with loading():`, does it import the `*_run` module beside it,
which does the work. `show`, `diff`, `profile`, `cache` and `doctor` need no torch.

Exit codes: 0 done; 1 no plan fits, or a rank cannot run the plan; 2 bad input; 3 torch,
fbgemm and torchrec are missing or do not match; 70 a bug in this package; 130
interrupted. Scripts rely on them: see docs/job_gate.md.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, TextIO

from torchrec_neuroshard import __version__, progress
from torchrec_neuroshard.errors import (
    ConfigError,
    EnvironmentMismatchError,
    InfeasibleError,
    NeuroShardError,
    suggestion,
)

_STARTED = time.monotonic()
"""When this process began, before torch and fbgemm take seconds to import."""

EXIT_NO_PLAN = 1
EXIT_USER_ERROR = 2
EXIT_BROKEN_ENVIRONMENT = 3
EXIT_FAULT = 70
"""From BSD's sysexits. Python's own 1 would read as "no plan fits"."""
EXIT_INTERRUPTED = 130

_OUTPUTS = ("out", "html", "json", "csv")
"""Options that name a file to write."""
_NO_TEXT = ("calibrate", "collect", "reshard", "train")
"""Commands whose `--out` is a folder or a file of records."""


class Command(NamedTuple):
    """One subcommand."""

    name: str
    module: str
    help: str


COMMANDS = (
    Command("plan", ".commands.plan", "plan a model or a file of tables"),
    Command("show", ".commands.stored", "show a saved plan"),
    Command("diff", ".commands.stored", "compare two saved plans"),
    Command("sweep", ".commands.plan", "compare cards, ranks and batch sizes"),
    Command("rehearse", ".commands.stored", "build every rank of a saved plan"),
    Command("reshard", ".commands.stored", "turn a checkpoint into one for a plan"),
    Command("profile", ".commands.profile", "profile the ids of a data set"),
    Command("calibrate", ".commands.bundles", "fit a cost model to this machine"),
    Command("collect", ".commands.measure", "measure kernels and collectives here"),
    Command("train", ".commands.bundles", "train a cost model on measurements"),
    Command("cache", ".commands.bundles", "list or delete first-launch measurements"),
    Command("completion", ".cli", "print the script that completes words in a shell"),
    Command(
        "doctor", ".hardware.doctor", "check that torch, fbgemm and torchrec match"
    ),
)


_OTHER_NAMES = {
    **dict.fromkeys(("--world-size", "--num-ranks", "--gpus", "--num-gpus"), "--ranks"),
    **dict.fromkeys(("--gpu", "--device"), "--card"),
    **dict.fromkeys(("--nproc-per-node", "--gpus-per-node"), "--ranks-per-node"),
    **dict.fromkeys(("--storage-reservation", "--percentage"), "--reserve"),
    **dict.fromkeys(("--intra-node-gbs", "--intra-host-bw"), "--intra-gb-per-s"),
    **dict.fromkeys(("--inter-node-gbs", "--inter-host-bw"), "--inter-gb-per-s"),
    **dict.fromkeys(("--timeout", "--time-limit"), "--seconds"),
    **dict.fromkeys(("-v", "--debug"), "--verbose"),
    "--output": "--out",
    "--hbm-gb": "--memory-gb",
}
"""What other tools call an option -> our name."""


class _Parser(argparse.ArgumentParser):
    """Reports a wrong option in one line, with the option that was probably meant."""

    def __init__(self, **settings: Any) -> None:
        layout = argparse.RawDescriptionHelpFormatter  # keeps the lines of examples
        super().__init__(allow_abbrev=False, formatter_class=layout, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].partition("=")[0]
            self.error(f"unknown argument '{word}'{self._meant(word)}")
        return found, unknown

    def _meant(self, word: str) -> str:
        known = {o for action in self._actions for o in action.option_strings}
        own = _OTHER_NAMES.get(word)
        near = [own] if own else difflib.get_close_matches(word, known, n=1)
        return f"; did you mean {near[0]}?" if known & {*near} else ""

    def files(self) -> Iterator[argparse.Action]:
        """Yield the arguments that name files, also those of subcommands."""
        for action in self._actions:
            if isinstance(action.choices, Mapping):
                for subparser in action.choices.values():
                    yield from subparser.files()
            elif action.type is Path or action.dest == "model":
                yield action

    def error(self, message: str) -> NoReturn:
        text = f"{message}\n'{self.prog} --help' lists the options"
        self.exit(EXIT_USER_ERROR, f"{self.prog}: error: {text}\n")


class _UntilClosed:
    """An output whose reader may leave, as `head` does: the rest goes nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or drop the text once the reader has left."""
        with self._dropped():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, or drop what is left once the reader has left."""
        with self._dropped():
            self._stream.flush()

    @contextlib.contextmanager
    def _dropped(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: the arguments after the program's name; None reads `sys.argv`.

    Returns:
        The exit code. Errors of this package, missing frameworks, and files that cannot
        be read or written print a message to stderr. Bugs print a traceback. With the
        environment variable NEUROSHARD_DEBUG=1 every error prints one. SIGTERM
        interrupts like Ctrl-C. A closed output, such as a pipe to `head`, is no error:
        the command finishes and writes its files.

    Raises:
        SystemExit: `--help`, `--version`, or arguments that do not parse.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    output: Any = _UntilClosed(sys.stdout)
    try:
        with (
            contextlib.redirect_stdout(output),
            _interrupted_by_sigterm(),
            _phases_shown(),
        ):
            return _run(arguments)
    except KeyboardInterrupt:
        print("neuroshard: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
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
    finally:
        output.flush()


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM interrupt like Ctrl-C, so that measurements are kept."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python sets signal handlers only in the main thread
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _phases_shown() -> contextlib.AbstractContextManager[None]:
    """Show phases; under torchrun only on the first rank."""
    is_first = os.environ.get("RANK", "0") == "0"
    return progress.shown() if is_first else contextlib.nullcontext()


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    names = [command.name for command in COMMANDS]
    parser = _parser({chosen})
    if chosen is not None and chosen not in names:
        near = suggestion(chosen, names, "commands")
        parser.error(f"unknown command '{chosen}'; {near}")
    typed = shlex.join(["neuroshard", *arguments])
    args = parser.parse_args(
        arguments, argparse.Namespace(started=_STARTED, typed=typed)
    )
    if chosen is None:
        parser.print_help(sys.stderr)
        return EXIT_USER_ERROR
    with _printed(args):
        code: int = getattr(_module(chosen), f"run_{chosen}")(args)
    return code


def _parser(commands: Collection[str | None]) -> _Parser:
    """Return the parser, with the options of these commands alone."""
    parser = _Parser(
        prog="neuroshard",
        description="Shard TorchRec embedding tables by measured cost.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", metavar="command")
    for name, _, text in COMMANDS:
        subparser = subparsers.add_parser(name, help=text, description=_sentence(text))
        if name in commands:
            getattr(_module(name), f"add_{name}")(subparser)
    return parser


def _module(command: str) -> ModuleType:
    [where] = [c.module for c in COMMANDS if c.name == command]
    return importlib.import_module(where, __package__)


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard completion`."""
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    parser.epilog = 'example, in ~/.bashrc:\n  eval "$(neuroshard completion bash)"'


def run_completion(args: argparse.Namespace) -> int:
    """Print a script that completes commands, options and files.

    Raises:
        ConfigError: shtab is missing.
    """
    try:
        shtab = importlib.import_module("shtab")
    except ImportError as error:
        raise ConfigError(
            "completion needs shtab, which is not installed. Run `pip install shtab`"
        ) from error
    parser = _parser([command.name for command in COMMANDS])
    for action in parser.files():
        action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, args.shell))
    return 0


@contextlib.contextmanager
def _printed(args: argparse.Namespace) -> Iterator[None]:
    """Print the file that an option names "-"; all else goes to stderr then.

    Raises:
        ConfigError: Two options name "-", or the output is no text.
    """
    options = [o for o in _OUTPUTS if getattr(args, o, None) == Path("-")]
    if not options:
        yield
        return
    named = " and ".join(f"--{option}" for option in options)
    if len(options) > 1:
        raise ConfigError(f"{named} are both '-'; write one of them to a file")
    if args.command in _NO_TEXT:
        raise ConfigError(f"{named} cannot be '-': it is not text. Give it a name")
    output = sys.stdout
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "-"
        setattr(args, options[0], file)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        finally:  # an interrupted command may have written it
            if file.exists():
                output.write(file.read_text(encoding="utf-8"))


def _explain(error: Exception) -> Exception | str | None:
    """Return the error to show a user; None for a bug in this package."""
    if isinstance(error, NeuroShardError):
        return error
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: '{error.filename}'"
    from torchrec_neuroshard.hardware.doctor import explain_failure

    return explain_failure("this command", error)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
