"""The command line: one subcommand is loaded, errors become exit codes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from types import ModuleType

import pytest

from torchrec_neuroshard import cli, progress
from torchrec_neuroshard.errors import InfeasibleError

Run = Callable[[argparse.Namespace], int]


@pytest.fixture
def use_command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    """Adds a subcommand `act --times N` beside one whose module does not exist."""

    def use(run: Run) -> None:
        module = ModuleType("module_of_act")
        module.__dict__["add_arguments"] = lambda parser: parser.add_argument(
            "--times", type=int, default=1
        )
        module.__dict__["run"] = run
        monkeypatch.setitem(sys.modules, module.__name__, module)
        commands = (
            cli.Command("act", "do something", module.__name__),
            cli.Command("absent", "cannot be loaded", "a_module_that_nobody_wrote"),
        )
        monkeypatch.setattr(cli, "COMMANDS", commands)

    return use


def raising(error: BaseException) -> Run:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


def test_help_lists_every_command_and_loads_none() -> None:
    code = (
        "import sys\n"
        "from torchrec_neuroshard import cli\n"
        "try:\n"
        "    cli.main(['--help'])\n"
        "except SystemExit as stop:\n"
        "    assert stop.code == 0\n"
        "heavy = {'torch', 'torchrec', 'numpy', *(c.module for c in cli.COMMANDS)}\n"
        "print('loaded:', *sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1].strip() == "loaded:"
    for command in cli.COMMANDS:
        assert command.name in done.stdout.split()
        assert command.help in done.stdout


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InfeasibleError("table 'a' fits nowhere"), 2, "table 'a' fits nowhere"),
        (OSError(28, "No space left", "plan.json"), 2, "No space left: 'plan.json'"),
        (KeyboardInterrupt(), 130, None),
    ],
)
def test_an_error_is_one_line_on_stderr(
    use_command: Callable[[Run], None],
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    said: str | None,
) -> None:
    use_command(raising(error))
    assert cli.main(["act"]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    if said is not None:
        assert printed.err == f"neuroshard: error: {said}\n"


def test_debug_shows_where_an_error_came_from(
    use_command: Callable[[Run], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_command(raising(InfeasibleError("table 'a' fits nowhere")))
    monkeypatch.setenv("NEUROSHARD_DEBUG", "1")
    with pytest.raises(InfeasibleError, match="fits nowhere"):
        cli.main(["act"])


def test_missing_framework_names_the_doctor(
    use_command: Callable[[Run], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torchrec", None)

    def run(args: argparse.Namespace) -> int:
        import torchrec  # noqa: F401

        return 0

    use_command(run)
    assert cli.main(["act"]) == 2
    assert "torchrec_neuroshard doctor`" in capsys.readouterr().err


def test_nobody_who_reads_the_output_is_no_fault(
    use_command: Callable[[Run], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(args: argparse.Namespace) -> int:
        print("x")
        return 0

    use_command(run)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert cli.main(["act"]) == cli.EXIT_PIPE_CLOSED
        print("what is said later goes nowhere", flush=True)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_first_rank_shows_what_takes_time(
    use_command: Callable[[Run], None], monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    written: list[str] = []
    monkeypatch.setattr(progress, "_write", written.append)
    monkeypatch.setattr(progress, "TICK_S", 0.001)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    monkeypatch.setenv("RANK", rank)

    def run(args: argparse.Namespace) -> int:
        with progress.phase("acting"):
            end = time.monotonic() + (30.0 if rank == "0" else 0.05)
            while not written and time.monotonic() < end:
                time.sleep(0.001)
        return 0

    use_command(run)
    assert cli.main(["act"]) == 0
    assert any("acting, 0 s" in line for line in written) == (rank == "0")
