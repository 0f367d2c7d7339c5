"""Atomic writes, early checks of outputs, and documents from unknown authors."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.files import (
    check_folder,
    check_outputs,
    from_fields,
    from_options,
    json_text,
    parse_json,
    read_json,
    write_whole,
)


def test_links_and_pipes_are_kept(tmp_path: Path) -> None:
    """Devices such as /dev/null must not be replaced by a file."""
    (tmp_path / "link").symlink_to(tmp_path / "a")
    write_whole(tmp_path / "link", "ü")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "a").read_text() == "ü"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert check_outputs(*[tmp_path / "pipe"] * 2)
    write_whole(tmp_path / "pipe", "ü")
    assert os.read(reader, 9) == "ü".encode() and (tmp_path / "pipe").is_fifo()
    os.close(reader)


def test_outputs_are_checked_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, other = tmp_path / "given", tmp_path / "other"
    (tmp_path / "link").symlink_to(given)
    assert check_outputs(other, None, read=(given, None)) == [other]
    for paths, message in (
        ([tmp_path], "it is a folder"),
        ([tmp_path / "no" / "a"], "no folder '.*no'"),
        ([tmp_path / ("a" * 300)], "file name too long"),
        ([other, other], "two options name it"),
        ([tmp_path / "link"], "it is an input file"),
    ):
        with pytest.raises(ConfigError, match=f"cannot write '.*': {message}"):
            check_outputs(*paths, read=(given,))
    given.write_text("")
    check_folder(tmp_path / "new" / "newer")
    with pytest.raises(ConfigError, match=r"cannot write to the folder .*' is a file"):
        check_folder(given / "new")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="permission denied"):
        check_folder(tmp_path / "new")
    with pytest.raises(ConfigError, match="permission denied"):
        check_outputs(other)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "a"
    write_whole(path, "older")
    write_whole(path, b"old")

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_json_is_strict_both_ways(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", json_text({"a": (1, float("nan")), "b": [-1e999]}))
    assert read_json(tmp_path / "a") == {"a": [1, None], "b": [None]}
    (tmp_path / "a").write_text("\ufeff[]", encoding="utf-8")
    assert read_json(tmp_path / "a") == []
    for text in ('["\\u000A\\t\\\\u001b"]', '["\\ud83d\\ude00"]'):
        assert parse_json(text) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[NaN]", "not finite"),
        ("[" * 10**5, "nested too deep"),
        ('["\\ud800"]', "surrogates"),
        ("[-1e999]", "not finite"),
        ('["\\u001b[2J"]', "control character"),
        ('{"\\\\\\u009F": 1}', "control character"),
        ('["\x7f"]', "control character"),
        ("9" * 5000, "4300 digits"),
        (" \n", "it is empty"),
        ('[{"a": 1, "b": 2, "a": 3}]', "'a' appears twice in one object"),
    ],
)
def test_bad_json_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


@dataclass(frozen=True, kw_only=True)
class Inner:
    names: tuple[str, ...]
    pair: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    count: int
    inner: Inner
    many: tuple[Inner, ...] = ()
    rates: Mapping[str, Sequence[float]] | None = None
    flag: bool = False


def test_field_types_decide_the_values() -> None:
    inner = {"names": ["a"], "pair": [1, 2.5]}
    rates = {"a": [1]}
    fields = {"count": 3.0, "inner": inner, "many": [inner], "rates": rates}
    found = from_fields(Outer, fields)
    made = Inner(names=("a",), pair=(1.0, 2.5))
    assert found == Outer(count=3, inner=made, many=(made,), rates={"a": (1.0,)})
    assert type(found.count) is int


def test_options_fill_fields_of_the_same_name() -> None:
    options = argparse.Namespace(count=4, names=["a"], pair=[1.0, 2.0], out="b")
    inner = from_options(Inner, options)
    assert inner == Inner(names=("a",), pair=(1.0, 2.0))
    found = from_options(Outer, options, inner=inner, count=3, many=[inner])
    assert found == Outer(count=3, inner=inner, many=(inner,))


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ({"count": 1.5}, "count must be .* 1.5"),
        ({"count": 2**63}, "count"),
        ({"inner": {}}, "'names' is missing"),
        ({"inner": {"names": "ab"}}, "names must be a list"),
        ({"inner": {"names": [], "pair": [1]}}, "a list of two"),
        ({"inner": {"names": [], "pair": [1, 10**400]}}, "pair must be a number"),
        ({"flag": 1}, "flag must be true or false"),
        ({"other" * 100: 1}, "^unknown field '(other)+"),
    ],
)
def test_values_of_wrong_types_are_refused(change: dict[str, Any], value: str) -> None:
    sound: dict[str, Any] = {"count": 1, "inner": {"names": []}}
    from_fields(Outer, sound)
    with pytest.raises(ValueError, match=value) as caught:
        from_fields(Outer, {**sound, **change})
    assert len(str(caught.value)) < 160
