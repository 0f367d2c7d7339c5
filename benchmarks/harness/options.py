"""Options of command lines: one by one, or the fields of a dataclass."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

Config = TypeVar("Config")


class RunError(Exception):
    """A benchmark cannot run with these options; the message says what to change."""


def add_option(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    name: str,
    default: Any,
    text: str,
    kind: Any = None,
    **more: Any,
) -> None:
    """Add the option `--name`.

    Args:
        parser: The parser.
        name: Name of the attribute. The option has dashes for its underscores.
        default: Default value. `...`: the option is required. False: it is a flag.
        text: Help text.
        kind: Type of the value, or of each value. None: the default's.
        more: Further arguments of `add_argument`.
    """
    if default is False:
        more["action"] = "store_true"
    else:
        more["type"] = kind or type(default)
    if default is ...:
        more["required"] = True
    else:
        more["default"] = default
    parser.add_argument(f"--{name.replace('_', '-')}", help=text, **more)


def option(default: Any, text: str, quick: Any = None) -> Any:
    """Return a field that is also an option.

    Args:
        default: Default value, which sets the type.
        text: Help text.
        quick: Default value with `--quick`. None: the usual default.
    """
    metadata = {"help": text, "quick": quick}
    return dataclasses.field(default=default, metadata=metadata)


def read_options(
    config: type[Config], arguments: Sequence[str] | None, description: str
) -> Config:
    """Return the configuration of a command line.

    If a field has a value for dry runs, there is an option `--quick` that takes it.

    Args:
        config: A dataclass whose fields are all `option`s.
        arguments: The command line. None: that of this process.
        description: Text whose first line is the first line of the help.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    fields = dataclasses.fields(config)  # type: ignore[arg-type]
    quick = {
        f.name: f.metadata["quick"] for f in fields if f.metadata["quick"] is not None
    }
    if quick:
        parser.add_argument(
            "--quick", action="store_true", help="tiny defaults, for a dry run"
        )
    for f in fields:
        text = f"{f.metadata['help']} (default: {f.default}"
        if f.name in quick:
            text += f"; with --quick: {quick[f.name]}"
        parser.add_argument(
            "--" + f.name.replace("_", "-"),
            type=type(f.default),
            help=f"{text})".replace("%", "%%"),
            default=argparse.SUPPRESS,
        )
    given = vars(parser.parse_args(arguments))
    if given.pop("quick", False):
        given = {**quick, **given}
    return config(**given)
