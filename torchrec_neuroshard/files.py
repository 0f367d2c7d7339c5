"""Read and write files safely: atomic writes, strict JSON, checked dataclasses.

A document is checked once, against the types of the dataclass that it becomes. Errors
here are bare facts, always `ValueError`: the caller knows which file it was and what to
do about it.
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

T = TypeVar("T")

_CONTROL = re.compile(
    r"(?<!\\)(?:\\\\)*"
    r"(\\(?:[bf]|u00(?:0[0-8bcef]|1[0-9a-f]|7f|[89][0-9a-f]))|[\x7f-\x9f])",
    re.IGNORECASE,
)
"""Control characters in JSON text, except tabs and line ends."""
_SURROGATE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)
TOO_LARGE = 2**63
"""Limit of integers (exclusive): arrays, files and kernels hold 64 bits."""


def write_whole(path: str | Path, data: bytes | str) -> None:
    """Write a file atomically; text is UTF-8.

    Links are followed. Pipes and devices are written to, never replaced.

    Raises:
        OSError: The file cannot be written; an old file stays unchanged.
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
            error.filename = str(path)  # the user never named the temporary file
        raise


def _is_stream(path: str | Path) -> bool:
    """Whether the path exists and is neither a file nor a folder."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def check_outputs(
    *paths: Path | None, read: Sequence[str | Path | None] = ()
) -> list[Path]:
    """Return the files to write, after checking early that they can be written.

    Args:
        paths: Output files that the user named; None is skipped.
        read: Input files, which must not be overwritten.

    Raises:
        ConfigError: An output file is a folder, its folder is missing, it may not be
            written, it is named twice, or it is also an input.
    """
    wanted = [path for path in paths if path is not None]
    taken = {os.path.realpath(path): "it is an input file" for path in read if path}
    for path in wanted:
        try:
            why = _obstacle(path)
        except OSError as error:  # the name is too long or a folder is unreadable
            why = str(error.strerror).lower()
        real = os.path.realpath(path)
        if why := why or taken.get(real, ""):
            raise ConfigError(f"cannot write '{path!s:.200}': {why}")
        if not _is_stream(path):
            taken[real] = "two options name it"
    return wanted


def check_folder(path: Path) -> None:
    """Check early that a folder can be created or written to.

    Raises:
        ConfigError: The folder can be neither created nor written to.
    """
    found = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not found.is_dir():
        raise ConfigError(f"cannot write to the folder '{path}': '{found}' is a file")
    if not os.access(found, os.W_OK):
        raise ConfigError(f"cannot write to '{found}': permission denied")


def _obstacle(path: Path) -> str:
    """Return why a file cannot be written; "" if no obstacle is known."""
    if path.is_dir():
        return "it is a folder"
    if not path.parent.is_dir():
        return f"no folder '{path.parent}'"
    if not os.access(path if _is_stream(path) else path.parent, os.W_OK):
        return "permission denied"
    return ""


def json_text(data: Any, indent: int | None = 1) -> str:
    """Return strict JSON; infinite numbers and NaN become null.

    Args:
        data: Values that JSON can hold.
        indent: Spaces per nesting level; None writes a single line.
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
        OSError: The file cannot be read.
        ValueError: The file is not strict JSON.
    """
    return parse_json(Path(path).read_text(encoding="utf-8-sig"))


def parse_json(text: str) -> Any:
    """Parse strict JSON: finite numbers, no control characters, no duplicate names.

    Without control characters no name can move a terminal's cursor or send it commands.
    Of two equal names in an object, one would be lost.

    Raises:
        ValueError: The text is not strict JSON, or is nested too deep.
    """
    if not text.strip():
        raise ValueError("it is empty")
    try:
        data = json.loads(
            text,
            object_pairs_hook=_object,
            parse_float=_finite_number,
            parse_constant=_finite_number,
        )
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if _SURROGATE.search(text):
        json.dumps(data, ensure_ascii=False).encode()  # fails on lone surrogates
    if found := _CONTROL.search(text):
        raise ValueError(f"it holds the control character {found[1]!r}")
    return data


def _finite_number(text: str) -> float:
    if math.isfinite(value := float(text)):
        return value
    raise ValueError("a number in it is not finite")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counted = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counted.items() if count > 1)
        raise ValueError(f"'{twice:.60}' appears twice in one object")
    return found


def from_fields(kind: type[T], data: Any) -> T:
    """Make a dataclass from the fields that a document holds.

    The field's type decides: lists become tuples, and 3.0 becomes the integer 3.

    Raises:
        ValueError: A field is missing, unknown or of another type, or the dataclass
            itself raises it.
    """
    made: T = _reader(typing.cast(Any, kind))(data, kind.__name__)
    return made


def from_options(kind: type[T], options: argparse.Namespace, **others: Any) -> T:
    """Make a dataclass from a command's options that share names with its fields.

    Args:
        kind: The dataclass.
        options: Parsed options; lists become tuples.
        others: Further fields; they take precedence over the options.
    """
    names = {f.name for f in dataclasses.fields(typing.cast(Any, kind))}
    given = {n: v for n, v in vars(options).items() if n in names} | others
    return kind(**{n: tuple(v) if isinstance(v, list) else v for n, v in given.items()})


def to_fields(made: Any) -> dict[str, Any]:
    """Return a dataclass's fields ready for JSON; `from_fields` reads them back.

    Nested dataclasses use their own `to_json` if they have one.
    """
    return {f.name: _plain(getattr(made, f.name)) for f in dataclasses.fields(made)}


def _plain(value: Any) -> Any:
    if type(value) in _PLAIN:  # a fast path: the checks below take longer
        return value
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if not dataclasses.is_dataclass(value):
        return value
    return value.to_json() if hasattr(value, "to_json") else to_fields(value)


def read_fields(kind: type[T], data: Any, error: type[ValueError], what: str) -> T:
    """Make a dataclass like `from_fields`, but raise one kind of error.

    Args:
        kind: The dataclass.
        data: Its fields as the document holds them.
        error: Class of the error; the dataclass may raise it itself, too.
        what: Noun for the error message, e.g. "table".
    """
    try:
        return from_fields(kind, data)
    except error:
        raise
    except ValueError as found:
        raise error(f"invalid {what}: {found}") from found


_Read = Callable[[Any, str], Any]
"""A value and its place in the document -> the value converted to its type."""


@functools.cache
def _reader(hint: Any) -> _Read:
    """Return the function that reads values of a type."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        # Files hold no unions except `... | None`.
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
    raise _wrong(where, "a 64-bit integer", value)


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
