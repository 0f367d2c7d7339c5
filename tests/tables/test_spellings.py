"""What people write in files of tables, and what the message to each mistake says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_neuroshard.errors import TableError
from torchrec_neuroshard.planner.option_facts import OPTIMIZERS
from torchrec_neuroshard.tables.spellings import (
    PRICED_AS,
    check_fields,
    read_value,
)
from torchrec_neuroshard.tables.table import TableConfig

FIELDS = ("name", "num_embeddings", "embedding_dim", "pooling_factor", "data_type")


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("num_embeddings", 1_000_000, "1000000 1_000_000 1,000,000 1e6 1E+6 1000000.0"),
        ("embedding_dim", 64, "64 64.0 6.4e1"),
        ("num_features", 3, "3 3.00"),
        ("pooling_factor", 2.5, "2.5 25e-1"),
        ("weighted", True, "true TRUE yes Yes 1"),
        ("pooled", False, "false False no NO 0"),
        ("data_type", "fp32", "fp32 FP32 float float32 torch.float32 DataType.FP32"),
        ("data_type", "fp16", "fp16 HALF float16 torch.half SparseType.FP16"),
        ("data_type", "bf16", "bf16 BF16 bfloat16 torch.bfloat16"),
        ("data_type", "int8", "int8 INT8 torch.int8"),
        (
            "optimizer",
            "sgd",
            "SGD sgd torch.optim.SGD EXACT_SGD EmbOptimType.EXACT_SGD",
        ),
        ("optimizer", "adam", "Adam ADAM"),
        ("optimizer", "adagrad", "Adagrad EXACT_ADAGRAD"),
        (
            "optimizer",
            "rowwise_adagrad",
            "rowwise_adagrad RowWiseAdagrad EXACT_ROWWISE_ADAGRAD ROWWISE_ADAGRAD "
            "exact_row_wise_adagrad exact_rowwise_adagrad",
        ),
        ("name", "1e6", "1e6"),
        ("data_type", "int4", "int4"),  # TableConfig refuses it
    ],
)
def test_spellings_of_a_value(field: str, value: object, text: str) -> None:
    for spelling in text.split():
        assert read_value(field, spelling) == value, spelling


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("num_embeddings", "40M", "a whole number, got '40M'; write 40000000 or 41943"),
        ("num_embeddings", "1.5 k", "; write 1500 or 1536$"),
        ("num_embeddings", "1b", "; write 1000000000$"),
        ("num_embeddings", "40.000", "; write 40 or 40000$"),
        ("num_embeddings", "12.345", "; write 12345$"),
        ("num_embeddings", "1.000.000", "; write 1000000$"),
        ("num_embeddings", "1 000", "; write 1000$"),
        ("num_embeddings", "12.5", "a whole number, got '12.5'$"),
        ("num_embeddings", "nan", "a whole number, got 'nan'$"),
        ("num_embeddings", "9" * 5000, "a whole number, got '999"),
        ("num_embeddings", "many", "a whole number, got 'many'$"),
        ("pooling_factor", "2,5", "a number, got '2,5'; write 2.5$"),
        ("pooling_factor", "2,500", "; write 2.5 or 2500$"),
        ("padding_share", "60%", "padding_share .* write 0.6$"),
        ("weighted", "maybe", "weighted must be true or false, got 'maybe'"),
    ],
)
def test_unclear_values_get_what_to_write(field: str, text: str, message: str) -> None:
    with pytest.raises(TableError, match=message):
        read_value(field, text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "colour",
            "unknown field 'colour'; leave it out; the fields are name, num_emb",
        ),
        ("rows", "unknown field 'rows'; leave it out$"),
        ("dtype", r"unknown field 'dtype'; did you mean 'data_type'\?$"),
        ("Data-Type", r"did you mean 'data_type'\?$"),
        ("pooling colour", "leave 'colour' out; .*mean 'pooling_factor' for 'pooling'"),
        (" ".join(f"f{i}" for i in range(20)), "'f11' and more"),
    ],
)
def test_wrong_names_are_told_together(given: str, message: str) -> None:
    names = [*FIELDS[:3], *given.split()]
    with pytest.raises(TableError, match=message):
        check_fields(names, FIELDS, FIELDS[:3])


@pytest.mark.parametrize(
    ("field", "value", "hint"),
    [
        ("data_type", torch.float32, "write 'fp32'"),
        ("data_type", DataType.FP16, "write 'fp16'"),
        ("data_type", "float32", "write 'fp32'"),
        ("optimizer", torch.optim.SGD, "write 'sgd'"),
        ("optimizer", RowWiseAdagrad, "write 'rowwise_adagrad'"),
        ("optimizer", EmbOptimType.EXACT_ROWWISE_ADAGRAD, "write 'rowwise_adagrad'"),
        ("optimizer", "LAMB", "the planner prices it as 'adam'"),
    ],
)
def test_python_callers_get_the_right_name(
    field: str, value: object, hint: str
) -> None:
    fields: Any = {"name": "a", "num_embeddings": 9, "embedding_dim": 8, field: value}
    with pytest.raises(TableError, match=rf"'a': {field} must be one of .*; {hint}$"):
        TableConfig(**fields)


def test_spellings_agree_with_the_planners_optimizers() -> None:
    found = {}
    for name in OPTIMIZERS:
        read = read_value("optimizer", name)
        found[name] = PRICED_AS.get(name.replace("_", "").lower(), read)
    # The file must name one; TorchRec's NONE is an optimizer that does nothing.
    assert found == {n: c for n, (c, _, _) in OPTIMIZERS.items()} | {"NONE": "NONE"}
