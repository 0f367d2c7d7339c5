"""Field names, numbers and types as people write them in files of tables.

Values in other spellings are read. Other names of fields only get a suggestion.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torchrec_neuroshard.errors import TableError

_OTHER_NAMES: Mapping[str, str] = {
    other: field
    for field, others in (
        ("name", "table table_name emb_name embedding_name feature feature_name"),
        (
            "num_embeddings",
            "rows num_rows n_rows row_count hash_size cardinality vocab vocab_size "
            "vocabulary_size buckets num_buckets hash_buckets num_categories "
            "num_unique table_size input_dim",
        ),
        (
            "embedding_dim",
            "dim dims emb_dim embed_dim embedding_size emb_size embed_size width "
            "embedding_width columns cols num_columns num_cols output_dim dimension",
        ),
        (
            "pooling_factor",
            "pooling pooling_factors avg_pooling hotness multi_hot avg_ids "
            "ids_per_sample lookups num_lookups avg_length mean_length bag_size",
        ),
        ("num_features", "features n_features feature_count feature_names"),
        ("data_type", "dtype type precision weights_precision"),
        ("optimizer", "optim opt optimizer_type"),
        ("length_p95", "p95"),
        ("length_max", "max_length max_len"),
        ("padding_share", "padding"),
    )
    for other in others.split()
}
"""Another name of a field -> the field of `TableConfig` or of a file of tables."""

_WHOLE = ("num_embeddings", "embedding_dim", "num_features")
_FLAGS: Mapping[str, bool] = {
    **dict.fromkeys(("true", "yes", "1"), True),
    **dict.fromkeys(("false", "no", "0"), False),
}
_SPELLINGS: Mapping[str, Mapping[str, str]] = {
    field: {other: known for known, others in names for other in others.split()}
    for field, names in (
        (
            "data_type",
            (
                ("fp32", "fp32 float32 float"),
                ("fp16", "fp16 float16 half"),
                ("bf16", "bf16 bfloat16"),
                ("int8", "int8"),
            ),
        ),
        (
            "optimizer",
            (
                ("rowwise_adagrad", "rowwiseadagrad exactrowwiseadagrad"),
                ("sgd", "sgd exactsgd"),
                ("adam", "adam"),
                ("adagrad", "adagrad exactadagrad"),
            ),
        ),
    )
}
"""Field -> a spelling, in small letters without underscores -> its value. They are
those of torch, TorchRec's `DataType` and optimizers, and FBGEMM's `EmbOptimType`."""
PRICED_AS: Mapping[str, str] = {
    "larssgd": "adagrad",
    "partialrowwiseadam": "adagrad",
    "partialrowwiselamb": "adagrad",
    "ensemblerowwiseadagrad": "adagrad",
    "emainplacerowwiseadagrad": "rowwise_adagrad",
    "rowwisermspropar": "rowwise_adagrad",
    "lamb": "adam",
}
"""Other optimizers -> the one whose costs they have; see planner.option_facts."""

_THOUSANDS = re.compile(r"\d{1,3}(?:[ .,'\u2019\u00a0\u202f]\d{3})+")
_DECIMAL = re.compile(r"\d+[.,]\d+")
_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?) ?([kmbgt%])", re.IGNORECASE)
_UNITS = {"%": 0.01, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_MOST_UNKNOWN = 12
"""Most unknown fields that a message lists."""


def known_name(name: str) -> str:
    """Return the field that another name stands for, or the name in small letters."""
    plain = re.sub(r"[\s-]+", "_", name[:100].strip().lower())
    return _OTHER_NAMES.get(plain, plain)


def meant_field(name: str, fields: Collection[str]) -> str | None:
    """Return the field that an unknown name most likely means."""
    if (known := known_name(name)) in fields:
        return known
    return next(iter(difflib.get_close_matches(known, fields, n=1)), None)


def check_fields(
    given: Sequence[str], fields: Sequence[str], required: Sequence[str]
) -> None:
    """Check the names of a table's fields, all at once.

    Args:
        given: The names that a file holds.
        fields: All names that there are.
        required: Those without a default.

    Raises:
        TableError: A field is unknown or missing.
    """
    unknown = [name for name in given if name not in fields]
    meant = {name: meant_field(name, fields) for name in unknown[:_MOST_UNKNOWN]}
    near = {n: field for n, field in meant.items() if field and field not in given}
    several = len(meant) > 1
    said = []
    if unknown:
        more = " and more" if len(unknown) > len(meant) else ""
        said.append(f"unknown field{'s' if several else ''} {_quoted(meant)}{more}")
    if superfluous := [name for name in meant if name not in near]:
        said.append(f"leave {_quoted(superfluous) if several else 'it'} out")
    if None in meant.values():
        said.append(f"the fields are {', '.join(fields)}")
    if missing := [f for f in required if f not in given and f not in near.values()]:
        known = ", ".join(name for name in given if name in fields) or "none"
        are = "s {} are" if len(missing) > 1 else " {} is"
        said.append(f"field{are.format(_quoted(missing))} missing (given: {known})")
    if near:
        hints = [
            f"'{f}' for {n!r:.60}" if several else f"'{f}'" for n, f in near.items()
        ]
        said.append(f"did you mean {', '.join(hints)}?")
    if said:
        raise TableError("; ".join(said))


def _quoted(names: Collection[str]) -> str:
    return ", ".join(f"{name!r:.60}" for name in names)


def read_value(field: str, value: Any) -> Any:
    """Return the value that a text means for a field; other values stay as they are.

    Raises:
        TableError: The text is no number, or neither true nor false.
    """
    if not isinstance(value, str) or field in ("name", "profile"):
        return value
    if field in _SPELLINGS:
        return _spelled(field, value) or value
    if field not in ("pooled", "weighted"):
        return _number(field, value.strip())
    if (flag := _FLAGS.get(value.strip().lower())) is None:
        raise TableError(f"{field} must be true or false, got {value!r:.60}")
    return flag


def meant_value(field: str, value: Any) -> str:
    """Return a clause that names the value to write instead of a wrong one.

    Args:
        field: A field of `TableConfig`.
        value: What was given, such as `torch.float32` or a class of optimizers.
    """
    if field not in _SPELLINGS:
        return ""
    text = str(getattr(value, "__name__", value))
    if known := _spelled(field, text):
        return f"; write '{known}'"
    priced = PRICED_AS.get(_plain(text)) if field == "optimizer" else None
    return f"; the planner prices it as '{priced}'" if priced else ""


def _spelled(field: str, text: str) -> str | None:
    return _SPELLINGS[field].get(_plain(text))


def _plain(text: str) -> str:
    """Return a name without its module or class, case and underscores."""
    return text.strip().rpartition(".")[2].replace("_", "").lower()


def is_number_text(text: str) -> bool:
    """Whether a text looks like a number."""
    return bool(re.match(r"[-+]?\.?\d", text))


def _number(field: str, text: str) -> float:
    """Return a number; whole ones may have commas or underscores between thousands.

    Raises:
        TableError: The text is no number, or could be two different ones.
    """
    whole = field in _WHOLE
    if whole and re.fullmatch(r"\d{1,3}(,\d{3})+", text):
        text = text.replace(",", "")
    found: float | None = None
    for kind in (float, int):  # integers keep all their digits
        with contextlib.suppress(ValueError):
            found = kind(text)
    # 40.000 may be 40 or 40,000, and a wrong guess would go unnoticed.
    unclear = whole and re.fullmatch(r"[1-9]\d{0,2}\.000", text)
    if found is None or unclear or (whole and found % 1 != 0):
        rule = "a whole number" if whole else "a number"
        raise TableError(
            f"{field} must be {rule}, got {text!r:.60}{_way_out(text, whole)}"
        )
    return found


def _way_out(text: str, whole: bool) -> str:
    """Return a clause with the numbers that a text may stand for."""
    meant: list[float] = []
    text = text if len(text) < 40 else ""
    if unit := _WITH_UNIT.fullmatch(text):
        number, letter = float(unit[1]), unit[2].lower()
        meant.append(number * _UNITS[letter])
        if letter in "kmgt":
            meant.append(number * 1024 ** ("kmgt".index(letter) + 1))
    if _DECIMAL.fullmatch(text):
        meant.append(float(text.replace(",", ".")))
    if _THOUSANDS.fullmatch(text):
        meant.append(int(re.sub(r"\D", "", text)))
    shown = [f"{n:.15g}" for n in meant if not whole or n == int(n)]
    return f"; write {' or '.join(shown)}" if shown else ""
