"""Public names live as long as docs/api.md promises.

`public_names.txt` holds those of the last release. `WRITE_PUBLIC_NAMES=1` renews it.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

import torchrec_neuroshard
from torchrec_neuroshard.bundles.descriptions import BUNDLE_VERSION, COMMS_VERSION
from torchrec_neuroshard.cli import COMMANDS
from torchrec_neuroshard.plans.stored_plan import PLAN_SCHEMA_VERSION
from torchrec_neuroshard.tables.features import FEATURE_VERSION

pytestmark = pytest.mark.one_release

ROOT = Path(__file__).parents[1]
FROZEN = ROOT / "tests" / "public_names.txt"
MONTHS_3 = timedelta(days=90)
_ENTRY = re.compile(r"^::: torchrec_neuroshard\.(\S+)\n((?:    .*\n)*)", re.MULTILINE)
"""An entry of docs/api.md: its path and options."""


def parameters(name: str, called: Any) -> Iterator[str]:
    for parameter in inspect.signature(called).parameters.values():
        named = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if named and parameter.name != "self":
            yield f"{name}({parameter.name})"


def members(name: str, value: type, listed: Iterable[str] | None) -> Iterator[str]:
    """Attributes and methods that the page shows: those listed, else all of ours."""
    ours = [c for c in value.__mro__ if c.__module__.startswith("torchrec_neuroshard")]
    found = {n for c in ours for n in vars(c)} if listed is None else listed
    for member in found:
        if not member.startswith(("_", "test_")):
            yield f"{name}.{member}"
            if callable(getattr(value, member)):
                yield from parameters(f"{name}.{member}", getattr(value, member))


def python_names(page: str) -> Iterator[str]:
    """Names of docs/api.md, as in `from torchrec_neuroshard import NAME`."""
    yield from torchrec_neuroshard.__all__
    for name, block in _ENTRY.findall(page):
        options = (yaml.safe_load(textwrap.dedent(block)) or {}).get("options", {})
        module, _, last = f"torchrec_neuroshard.{name}".rpartition(".")
        value = getattr(importlib.import_module(module), last)
        yield name
        if inspect.ismodule(value):  # the errors
            yield from (f"{name}.{n}" for n in vars(value) if n.endswith("Error"))
            continue
        yield from parameters(name, value)
        if isinstance(value, type):
            yield from members(name, value, options.get("members"))


def options_of(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield name
    for action in parser._actions:
        yield from (f"{name} {o}" for o in action.option_strings if o[:2] == "--")
        if isinstance(action, argparse._SubParsersAction):
            for kind, subparser in action.choices.items():
                yield from options_of(f"{name} {kind}", subparser)


def public_names() -> set[str]:
    names = set(python_names((ROOT / "docs" / "api.md").read_text(encoding="utf-8")))
    for command in COMMANDS:
        parser = argparse.ArgumentParser()
        module = importlib.import_module(command.module, "torchrec_neuroshard")
        getattr(module, f"add_{command.name}")(parser)
        names.update(options_of(f"neuroshard {command.name}", parser))
    return names | {
        f"plan files of version {PLAN_SCHEMA_VERSION}",
        f"bundles of kernels of version {BUNDLE_VERSION}",
        f"bundles of collectives of version {COMMS_VERSION}",
        f"bundles with features of version {FEATURE_VERSION}",
    }


def may_go(since: str, version: str, releases: Mapping[str, date]) -> bool:
    """Whether a name that a release deprecated may be gone in a version."""
    minor_is_over = Version(version).release[:2] > Version(since).release[:2]
    return minor_is_over and date.today() - releases.get(since, date.max) >= MONTHS_3


def lost(frozen: Iterable[str], names: set[str], gone: Iterable[str]) -> list[str]:
    """Frozen names that are missing, though neither they nor their owners may go."""
    ends = tuple(f"{name}{end}" for name in gone for end in ("\n", "(", ".", " "))
    return [n for n in frozen if n not in names and not f"{n}\n".startswith(ends)]


def test_public_names_live_as_long_as_promised() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    dated = re.findall(r"^## ([\d.]+) \(([\d-]+)\)$", changelog, re.MULTILINE)
    releases = {version: date.fromisoformat(day) for version, day in dated}
    deprecated = re.findall(r"^\| `(.+)` \| ([\d.]+) \|", page, re.MULTILINE)
    version, names = torchrec_neuroshard.__version__, public_names()
    gone = [name for name, since in deprecated if may_go(since, version, releases)]

    of_version, *frozen = FROZEN.read_text(encoding="utf-8").splitlines()
    missing = lost(frozen, names, gone)
    is_release = not Version(version).is_devrelease
    is_frozen = not Version(of_version).is_devrelease  # not so before 0.3.0
    may_write = not is_frozen or (is_release and not missing)
    if "WRITE_PUBLIC_NAMES" in os.environ and may_write:
        text = "\n".join([version, *sorted(names)])
        FROZEN.write_text(f"{text}\n", encoding="utf-8")
        return
    way_out = "deprecate first (docs/api.md)" if is_frozen else "WRITE_PUBLIC_NAMES=1"
    assert not missing, f"public names of {of_version} are gone: {way_out}"
    if is_release:
        expected = (version, sorted(names))
        assert (of_version, frozen) == expected, "renew the list: WRITE_PUBLIC_NAMES=1"


def test_names_that_are_missed_and_names_that_may_go() -> None:
    frozen = ["replan", "replan(model)", "replan.x", "replanner", "neuroshard plan --a"]
    assert lost(frozen, {*frozen, "new"}, []) == []
    assert lost(frozen, set(frozen[1:]), []) == ["replan"]
    assert lost(frozen, set(), ["replan"]) == ["replanner", "neuroshard plan --a"]
    assert lost(frozen, set(frozen[:4]), ["neuroshard plan"]) == []


@pytest.mark.parametrize(
    ("since", "version", "expected"),
    [
        ("0.3.0", "0.4.0.dev0", True),
        ("0.3.0", "1.0.0", True),
        ("0.3.0", "0.3.1", False),
        ("0.4.0", "0.5.0", False),
        ("0.9.0", "1.0.0", False),
    ],
    ids=["next minor", "next major", "a fix", "too early", "not released"],
)
def test_a_deprecated_name_stays_for_a_minor_version_and_three_months(
    since: str, version: str, expected: bool
) -> None:
    today = date.today()
    releases = {"0.3.0": today - MONTHS_3, "0.4.0": today - timedelta(days=1)}
    assert may_go(since, version, releases) is expected
