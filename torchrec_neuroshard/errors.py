"""Every error that this package raises on purpose.

The tree, with the built-in class that each branch also derives from:

- NeuroShardError
    - ConfigError (ValueError): a setting is not allowed
        - TableError: a table's description contradicts itself
        - ProfileError: batches or a profile cannot be used
    - FeatureSchemaError (ValueError): features and cost model do not match
    - BundleError (ValueError): a cost-model bundle cannot be used
        - BundleCorruptError: its files are missing, damaged or altered
        - BundleMismatchError: it is intact, but was made for something else
    - RecordError (ValueError): a cost record cannot be used
        - RecordMismatchError: records do not belong together
    - PlacementError (ValueError): a placement breaks one of its own rules
        - InfeasibleError: no placement satisfies the given limits
    - PlanFileError (ValueError): a plan cannot be saved, or a plan file cannot be used
        - PlanMismatchError: it is intact, but was made for another job
    - CheckpointError (ValueError): a checkpoint cannot be read or written
    - RankFailureError (RuntimeError): a rank died or stopped responding while the
      others waited for it
    - DeviceFailureError (RuntimeError): a GPU failed during a measurement and only a
      new process can recover it
    - EnvironmentMismatchError (RuntimeError): installed packages are missing
      or do not belong together; `neuroshard doctor` prints the command that fixes it

A `StalePlanWarning` (UserWarning) is shown for a stored plan that still works.

A message says the rule, the value, where it was found and the way out. Inner
code raises the bare fact; the entry point adds table, rank and plan. Messages may quote
files from unknown authors, so texts above 4,000 characters lose their middle.
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Collection
from typing import Any

_MOST_CHARACTERS = 4_000
_MAX_NAMED, _MAX_LETTERS = 12, 100
"""Most names that a message lists, and most letters of each; the rest is cut off."""


def suggestion(name: str, known: Collection[str], kind: str) -> str:
    """Return a clause that suggests known names for an unknown one.

    Args:
        name: The unknown name.
        known: All known names.
        kind: Plural noun for the names, e.g. "columns".
    """
    names = sorted(set(known))
    lower = {n.lower(): n for n in reversed(names)}
    found = difflib.get_close_matches(name[:_MAX_LETTERS].lower(), lower, n=3)
    if found:
        near = [f"'{lower[n]:.{_MAX_LETTERS}}'" for n in found]
        return f"did you mean {' or '.join(near)}?"
    shown = ", ".join(f"'{n:.{_MAX_LETTERS}}'" for n in names[:_MAX_NAMED]) or "none"
    return f"the {kind} are {shown}{' and more' if len(names) > _MAX_NAMED else ''}."


class NeuroShardError(Exception):
    """Base class of all errors of this package."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*[_shortened(a) if isinstance(a, str) else a for a in args])


def _shortened(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    # The rule and the place come first, the way out last.
    half = _MOST_CHARACTERS // 2 - 50
    return f"{text[:half]} [{len(text) - 2 * half:,} characters] {text[-half:]}"


class ConfigError(NeuroShardError, ValueError):
    """A setting is not allowed."""


class TableError(ConfigError):
    """A table's description contradicts itself or cannot be split as asked."""


class ProfileError(ConfigError):
    """Batches cannot be profiled, or a profile does not match its table."""


class FeatureSchemaError(NeuroShardError, ValueError):
    """Features differ in number, names or version from those that a model expects."""


class BundleError(NeuroShardError, ValueError):
    """A cost-model bundle cannot be used."""


class BundleCorruptError(BundleError):
    """A bundle's files are missing, damaged or altered."""


class BundleMismatchError(BundleError):
    """An intact bundle was made for another device, schema or version."""


class RecordError(NeuroShardError, ValueError):
    """A cost record cannot be read or used."""


class RecordMismatchError(RecordError):
    """Cost records do not belong together, or belong to another task."""


class PlacementError(NeuroShardError, ValueError):
    """A placement breaks one of its own rules."""


class InfeasibleError(PlacementError):
    """No placement satisfies the given limits."""


class PlanFileError(NeuroShardError, ValueError):
    """A plan cannot be saved, or a plan file cannot be used."""


class PlanMismatchError(PlanFileError):
    """A valid plan file was made for other tables, ranks or devices."""


class StalePlanWarning(UserWarning):
    """A plan still works, but was made for another batch size, cost model or so on."""


class CheckpointError(NeuroShardError, ValueError):
    """A checkpoint is damaged, incomplete or of another model, or cannot be written."""


class RankFailureError(NeuroShardError, RuntimeError):
    """A rank died or stopped responding while the others waited for it."""


class DeviceFailureError(NeuroShardError, RuntimeError):
    """A GPU failed, and only a new process can recover it."""


class EnvironmentMismatchError(NeuroShardError, RuntimeError):
    """Installed packages are missing or do not belong together."""


def check_kind(
    name: str,
    given: Any,
    *kinds: type,
    error: type[NeuroShardError] = ConfigError,
) -> None:
    """Check the type of an argument early.

    Args:
        name: The argument.
        given: Its value.
        kinds: Types that are allowed.
        error: Class of the error.

    Raises:
        ConfigError: The type is another; or `error`.
    """
    if not isinstance(given, kinds):
        wanted = " or ".join(f"{kind.__module__}.{kind.__name__}" for kind in kinds)
        raise error(
            f"{name} is a {type(given).__name__}, {given!r:.60}: pass a "
            f"{wanted.replace('builtins.', '')}"
        )


def is_number(given: object, *, whole: bool = False) -> bool:
    """Whether a value is a real number, or a whole one; True and False are none."""
    kind = numbers.Integral if whole else numbers.Real
    return isinstance(given, kind) and not isinstance(given, bool)


def check_number(
    name: str,
    given: Any,
    *,
    least: float = 0,
    above: bool = False,
    whole: bool = False,
    finite: bool = True,
    error: type[NeuroShardError] = ConfigError,
) -> None:
    """Check that an argument is a number in its range.

    Args:
        name: The argument.
        given: Its value. True and False are no numbers.
        least: The smallest number that is allowed.
        above: Whether `least` itself is not allowed.
        whole: Whether only integers are allowed.
        finite: Whether infinity is not allowed.
        error: Class of the error.

    Raises:
        ConfigError: It is something else; or `error`.
    """
    if is_number(given, whole=whole):
        value = float(given)
        if (value > least if above else value >= least) and (
            not finite or value < math.inf
        ):
            return
    wanted = "a whole number" if whole else "a finite number" if finite else "a number"
    rule = f"above {least:g}" if above else f"of at least {least:g}"
    raise error(f"{name} must be {wanted} {rule}, got {given!r:.60}")
