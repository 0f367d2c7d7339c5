"""The command line: one subcommand is loaded, errors become exit codes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from torchrec_neuroshard import cli, progress
from torchrec_neuroshard.errors import ConfigError, InfeasibleError


def use_command(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[argparse.Namespace], int]
) -> None:
    """Adds a subcommand `act` beside one whose module does not exist."""
    module: Any = ModuleType("module_of_act")
    module.add_act = lambda parser: parser.add_argument("--batch-size")
    module.run_act = run
    monkeypatch.setitem(sys.modules, module.__name__, module)
    commands = (
        cli.Command("act", module.__name__, "do something"),
        cli.Command("absent", "a_module_that_nobody_wrote", "cannot be loaded"),
    )
    monkeypatch.setattr(cli, "COMMANDS", commands)


def test_bundles_are_trained_and_listed_without_fbgemm() -> None:
    code = (
        "import sys, torchrec_neuroshard.commands.bundles_run\n"
        "print('fbgemm_gpu' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_help_lists_every_command_and_loads_none() -> None:
    code = (
        "import sys\n"
        "from torchrec_neuroshard import cli\n"
        "try:\n"
        "    cli.main(['--help'])\n"
        "except SystemExit as stop:\n"
        "    assert stop.code == 0\n"
        "own = {cli.__package__ + c.module for c in cli.COMMANDS} - {cli.__name__}\n"
        "heavy = {'torch', 'torchrec', 'numpy', *own}\n"
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
        (InfeasibleError("table 'a' fits nowhere"), 1, "table 'a' fits nowhere\n"),
        (ConfigError("no card 'x'"), 2, "no card 'x'\n"),
        (OSError(28, "No space left", "plan.json"), 2, "No space left: 'plan.json'\n"),
        # The doctor is named where a framework is missing.
        (ModuleNotFoundError("no", name="torchrec"), 3, "torchrec_neuroshard doctor`"),
        (KeyboardInterrupt(), 130, None),
    ],
)
def test_an_error_is_one_line_on_stderr(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    said: str | None,
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise error

    use_command(monkeypatch, run)
    assert cli.main(["act"]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    if said is not None:
        assert printed.err.startswith("neuroshard: error: ") and said in printed.err
        monkeypatch.setenv("NEUROSHARD_DEBUG", "1")  # shows where it came from
        assert cli.main(["act"]) == code
        shown = capsys.readouterr().err
        assert shown.startswith("Traceback ") and shown.endswith(printed.err)


def test_a_fault_of_our_own_is_none_of_the_plans(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own exit code would say that no plan fits."""

    def run(args: argparse.Namespace) -> int:
        raise ZeroDivisionError("division by zero")

    use_command(monkeypatch, run)
    assert cli.main(["act"]) == cli.EXIT_FAULT == 70
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback ")
    assert shown.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "act --bach-size=3",
            "act: error: unknown argument '--bach-size'; did you mean --batch-size?",
        ),
        ("act --batch 3", "did you mean --batch-size?"),  # no abbreviations
        ("act --zzz", "act: error: unknown argument '--zzz'\n"),
        ("act more", "act: error: unknown argument 'more'\n"),
        ("atc", "error: unknown command 'atc'; did you mean 'act'?"),
    ],
)
def test_misspelt_options_and_commands_are_suggested(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    said: str,
) -> None:
    use_command(monkeypatch, lambda args: 0)
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments.split())
    shown = capsys.readouterr().err
    assert said in shown
    assert len(shown.splitlines()) == 2 and shown.endswith("lists the options\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--world-size 8", "'--world-size'; did you mean --ranks?"),
        ("--gpu h100", "'--gpu'; did you mean --card?"),
        ("-v", "'-v'; did you mean --verbose?"),
        ("--storage-reservation 0.2", "did you mean --reserve?"),
        ("--inter-host-bw 50", "did you mean --inter-gb-per-s?"),
    ],
)
def test_names_of_other_tools_are_understood(
    capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", "t.csv", *words.split()])
    assert f"unknown argument {said}\n"[-len(said) - 1 :] in capsys.readouterr().err


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for words in (["help", "plan"], ["plan", "--help"]):
        with pytest.raises(SystemExit, match="0"):
            cli.main(words)
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    groups = ("\nmodel:\n", "\ncosts and search:\n", "\ndevices:\n", "\noutput:\n")
    places = [shown[0].index(group) for group in groups]
    assert places == sorted(places)
    assert shown[0].rpartition("\nexamples:\n")[2].startswith("  neuroshard plan ")


def test_bash_completes_commands_options_and_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["completion", "bash"]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "tables.csv").touch()
    for words, wanted in (
        (["swe"], "sweep"),
        (["plan", "--host"], "--host-memory-gb"),
        (["plan", "tab"], "tables.csv"),
    ):
        typed = " ".join(f"'{word}'" for word in ("neuroshard", *words))
        shell = (
            f"source {script}; COMP_WORDS=({typed}); COMP_CWORD={len(words)}; "
            '_shtab_neuroshard; echo "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            ["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True
        )
        assert wanted in done.stdout.split(), (words, done)


def test_completion_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "zsh"]) == 2
    assert "Run `pip install shtab`" in capsys.readouterr().err


def test_a_reader_who_leaves_stops_no_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finished = []

    def run(args: argparse.Namespace) -> int:
        print("x" * 100_000, flush=True)
        print("the rest goes nowhere")
        finished.append(args)
        return 1

    use_command(monkeypatch, run)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert cli.main(["act"]) == 1
    assert finished


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_first_rank_shows_what_takes_time(
    monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    shown = MagicMock()
    monkeypatch.setattr(progress, "shown", shown)
    use_command(monkeypatch, lambda args: 0)
    assert cli.main(["act"]) == 0
    assert shown.return_value.__enter__.called == (rank == "0")
