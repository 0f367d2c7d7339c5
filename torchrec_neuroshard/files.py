"""Files that appear whole or not at all, and what anybody may have written or typed.

What a document holds is checked once, against the types of the dataclass that it is to
become. Errors here are bare facts, `ValueError` throughout: whoever reads a file knows
what it was and what to do.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import re
import stat
import types
import typing
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torchrec_neuroshard.errors import ConfigError, suggestion

__all__ = [
    "TOO_LARGE",
    "check_folder",
    "check_outputs",
    "from_fields",
    "from_options",
    "json_text",
    "parse_json",
    "read_fields",
    "read_json",
    "to_fields",
    "write_whole",
]

T = TypeVar("T")

_CONTROL = re.compile(r"(?<!\\)(?:\\\\)*(\\(?:[bf]|u00[01][0-9a-f])|[\x7f-\x9f])")
"""In JSON: all but tabulators and ends of lines."""
TOO_LARGE = 2**63
"""Whole numbers are below: arrays, files and kernels hold no larger ones."""


def write_whole(path: str | Path, data: bytes | str) -> None:
    """Write a file that appears whole or not at all; text is UTF-8.

    Pipes and devices are written to, and links followed: they stay what they are.

    Raises:
        OSError: It cannot be written; the old file, if any, is as it was.
    """
    content = data.encode() if isinstance(data, str) else data
    if _is_stream(path):
        with Path(path).open("wb") as stream:
            stream.write(content)
        return
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".{target.name[:200]}.{uuid.uuid4().hex[:8]}")
    try:
        with beside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # not that of a file which the user never named
        raise


def _is_stream(path: str | Path) -> bool:
    """Whether there is something that is neither a file nor a folder."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def check_outputs(
    *paths: Path | None, read: Sequence[str | Path | None] = ()
) -> list[Path]:
    """Return the files to write, before the work that they are to hold is done.

    Args:
        paths: What the user named; None: nothing.
        read: What is read: none of it is to be written over.

    Raises:
        ConfigError: One is a folder, has none to be in, may not be written, is named
            twice, or is read.
    """
    wanted = [path for path in paths if path is not None]
    taken = {os.path.realpath(path): "that is read" for path in read if path}
    for path in wanted:
        try:
            why = _obstacle(path)
        except OSError as error:  # a name too long, a folder that may not be looked at
            why = str(error.strerror).lower()
        real = os.path.realpath(path)
        if why := why or taken.get(real, ""):
            raise ConfigError(f"cannot write '{path!s:.200}': {why}")
        if not _is_stream(path):
            taken[real] = "two options name it"
    return wanted


def check_folder(path: Path) -> None:
    """Check that a folder can be written to or made, before what it is to hold is.

    Raises:
        ConfigError: It cannot.
    """
    found = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not found.is_dir():
        raise ConfigError(f"cannot write to the folder '{path}': '{found}' is a file")
    if not os.access(found, os.W_OK):
        raise ConfigError(f"cannot write to '{found}': permission denied")


def _obstacle(path: Path) -> str:
    """Say why a file cannot be written; "" where nothing is known to be in the way."""
    if path.is_dir():
        return "that is a folder"
    if not path.parent.is_dir():
        return f"no folder '{path.parent}'"
    if not os.access(path if _is_stream(path) else path.parent, os.W_OK):
        return "permission denied"
    return ""


def json_text(data: Any, indent: int | None = 1) -> str:
    """Return strict JSON; what is infinite or not known becomes null.

    Args:
        data: What JSON can hold.
        indent: Of what is nested. None: all in one line.
    """
    return json.dumps(_finite(data), indent=indent, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: str | Path) -> Any:
    """Parse a file; see `parse_json`.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no such JSON.
    """
    return parse_json(Path(path).read_text(encoding="utf-8-sig"))


def parse_json(text: str) -> Any:
    """Parse JSON whose numbers are finite and whose strings are text.

    So no name in it can move a terminal's cursor or speak to it. No name stands twice
    in an object, of which one would be lost.

    Raises:
        ValueError: It is no such JSON, or nested too deep.
    """
    if not text.strip():
        raise ValueError("it is empty")
    try:
        data = json.loads(text, object_pairs_hook=_object)
        try:
            again = json.dumps(data, ensure_ascii=False, allow_nan=False)
        except ValueError:
            raise ValueError("a number in it is not finite") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    again.encode()  # which halves of characters do not survive
    if found := _CONTROL.search(again):
        raise ValueError(f"it holds the control character {found[1]!r}")
    return data


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counted = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counted.items() if count > 1)
        raise ValueError(f"'{twice:.60}' stands twice in one object")
    return found


def from_fields(kind: type[T], data: Any) -> T:
    """Make a dataclass of what JSON or Parquet gave for its fields.

    Lists become tuples, and whole numbers that are stated as 3.0 whole, where the
    field's type says so.

    Raises:
        ValueError: A field is missing, unknown or of another type, or what the
            dataclass itself raises.
    """
    made: T = _reader(typing.cast(Any, kind))(data, kind.__name__)
    return made


def from_options(kind: type[T], options: argparse.Namespace, **others: Any) -> T:
    """Make a dataclass of those options of a command that are called as its fields.

    Args:
        kind: The dataclass.
        options: As they were parsed; lists become tuples.
        others: What no option says as it stands.
    """
    names = {f.name for f in dataclasses.fields(typing.cast(Any, kind))}
    given = {n: v for n, v in vars(options).items() if n in names} | others
    return kind(**{n: tuple(v) if isinstance(v, list) else v for n, v in given.items()})


def to_fields(made: Any) -> dict[str, Any]:
    """Return a dataclass as JSON holds it, for `from_fields` to read back.

    Dataclasses that it holds write themselves, where they have a `to_json`.
    """
    return {f.name: _plain(getattr(made, f.name)) for f in dataclasses.fields(made)}


def _plain(value: Any) -> Any:
    if type(value) in _PLAIN:  # most are, and the checks below take longer
        return value
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if not dataclasses.is_dataclass(value):
        return value
    return value.to_json() if hasattr(value, "to_json") else to_fields(value)


def read_fields(kind: type[T], data: Any, error: type[ValueError], what: str) -> T:
    """Do as `from_fields`, but raise one kind of error.

    Args:
        kind: The dataclass.
        data: What a document gave for its fields.
        error: What to raise; the dataclass may raise it by itself, too.
        what: It is not, if not: "a table".
    """
    try:
        return from_fields(kind, data)
    except error:
        raise
    except ValueError as found:
        raise error(f"not {what}: {found}") from found


_Read = Callable[[Any, str], Any]
"""A value and where it was found -> the value as its type wants it."""


@functools.cache
def _reader(hint: Any) -> _Read:
    """Return what reads values of a type."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        # The only unions that files hold.
        [known] = [a for a in inner if a is not types.NoneType]
        read = _reader(known)
        return lambda value, where: None if value is None else read(value, where)
    if dataclasses.is_dataclass(hint):
        return _of_dataclass(hint)
    if origin is tuple and len(inner) == 2 and inner[1] is not ...:
        return _of_pair(_reader(inner[0]), _reader(inner[1]))
    if origin in (tuple, Collection, Sequence):
        return _of_items(_reader(inner[0]))
    if origin is Mapping:
        return _of_mapping(_reader(inner[1]))
    return _PLAIN[hint]


def _wrong(where: str, expected: str, value: Any) -> ValueError:
    return ValueError(f"{where} must be {expected}, got {value!r:.60}")


def _number(value: Any, where: str) -> float:
    if type(value) in (int, float) and abs(value) < math.inf:
        try:
            return float(value)
        except OverflowError:
            pass
    raise _wrong(where, "a number", value)


def _whole(value: Any, where: str) -> int:
    if type(value) in (int, float) and abs(value) < TOO_LARGE and value == int(value):
        return int(value)
    raise _wrong(where, "a number, whole and of 64 bits", value)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(where, "text", value)
    return value


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong(where, "true or false", value)
    return value


_PLAIN: Mapping[Any, _Read] = {
    float: _number,
    int: _whole,
    str: _text,
    bool: _flag,
    Any: lambda value, where: value,
}


def _of_items(read: _Read) -> _Read:
    def items(value: Any, where: str) -> Any:
        if not isinstance(value, list | tuple):
            raise _wrong(where, "a list", value)
        return tuple([read(v, where) for v in value])

    return items


def _of_pair(*reads: _Read) -> _Read:
    def pair(value: Any, where: str) -> Any:
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise _wrong(where, "a list of two", value)
        return tuple([read(v, where) for read, v in zip(reads, value, strict=True)])

    return pair


def _of_mapping(read: _Read) -> _Read:
    def mapping(value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            raise _wrong(where, "an object", value)
        return {_text(k, where): read(v, where) for k, v in value.items()}

    return mapping


def _of_dataclass(kind: Any) -> _Read:
    hints = typing.get_type_hints(kind)
    fields = [f for f in dataclasses.fields(kind) if f.init]
    reads = {f.name: _reader(hints[f.name]) for f in fields}
    no_default = dataclasses.MISSING
    required = {
        f.name
        for f in fields
        if f.default is no_default and f.default_factory is no_default
    }

    def fields_of(value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            raise _wrong(where, "an object", value)
        for name in value:
            if name not in reads:
                raise ValueError(
                    f"unknown field {name!r:.60}; "
                    + suggestion(str(name), reads, "fields")
                )
        found = {name: reads[name](v, name) for name, v in value.items()}
        if missing := required - value.keys():
            raise ValueError(f"field '{min(missing)}' is missing")
        return kind(**found)

    return fields_of
