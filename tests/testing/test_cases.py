"""The parts that the contracts are made of, and that a third party can use them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchrec_neuroshard.testing import CostModelContract, SearcherContract
from torchrec_neuroshard.testing.cases import expect_close

EXTENDING = Path(__file__).parents[2] / "docs" / "extending.md"


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
        cwd=EXTENDING.parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("named", "contract"),
    [
        ("TestMeasuredLaunch", CostModelContract),
        pytest.param("TestBestOfThree", SearcherContract, marks=pytest.mark.nightly),
    ],
)
def test_examples_of_the_documentation_keep_their_contract(
    named: str, contract: type
) -> None:
    text = EXTENDING.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    [code] = [block for block in blocks if f"class {named}" in block]
    names: dict[str, Any] = {"__name__": "extending"}
    exec(code, names)
    tests = [
        value
        for name, value in names.items()
        if name.startswith("Test") and issubclass(value, contract)
    ]
    assert len(tests) == 1
    cases = [name for name in dir(tests[0]) if name.startswith("test_")]
    assert len(cases) >= 10
    for case in cases:
        getattr(tests[0](), case)()
