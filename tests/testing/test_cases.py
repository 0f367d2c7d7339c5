"""The parts that the contracts are made of."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from torchrec_neuroshard.testing.cases import expect_close


@pytest.mark.parametrize(
    ("found", "wanted"),
    [([1.0, 2.0], [1.0, 2.1]), ([1.0], [[1.0]]), ([np.nan], [1.0]), ([1e-9], [0.0])],
)
def test_expect_close_finds(found: Any, wanted: Any) -> None:
    with pytest.raises(AssertionError, match="what: "):
        expect_close(found, wanted, 0.01, "what")


def test_needs_neither_pytest_nor_torchrec() -> None:
    code = (
        "import sys, torchrec_neuroshard.testing\n"
        "print(sorted({'pytest', '_pytest', 'torchrec', 'fbgemm_gpu'} & "
        "set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
