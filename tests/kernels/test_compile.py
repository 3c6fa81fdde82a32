"""Every kernel compiles for the GPUs it is for, and fits: as the engine launches it, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from kernels.compiling import ARCHITECTURES, SHARED_LIMIT, Specialisation, modules
from tests.support.compiling import run_compiling


def _check(rows: list[dict[str, Any]], *, may_spill: bool = False) -> None:
    assert {row["module"] for row in rows} == set(modules())
    assert {row["sm"] for row in rows} == set(ARCHITECTURES)
    for row in rows:
        assert not row["error"], row
        assert 0 < row["registers"] <= 255 and row["shared_bytes"] <= SHARED_LIMIT[row["sm"]], row
        assert may_spill or row["spill_bytes"] == 0, row


def test_bfloat16_fits() -> None:
    _check(run_compiling("--dtype", "bf16"))


@pytest.mark.long
def test_float16_fits() -> None:
    _check(run_compiling("--dtype", "fp16"))


@pytest.mark.long
def test_float32_compiles() -> None:
    _check(run_compiling("--dtype", "fp32"), may_spill=True)


def test_what_does_not_fit_is_told() -> None:
    """The harness itself, which must see what kernels are checked for."""
    rows = {row["name"]: row for row in run_compiling(module="tests.support.misfits")}
    assert rows["registers"]["spill_bytes"] > 0 and not rows["registers"]["error"]
    assert rows["shared"]["shared_bytes"] > SHARED_LIMIT[90] and not rows["shared"]["error"]
    assert "no_such_name" in rows["error"]["error"]


def test_a_specialisation_knows_its_dtype() -> None:
    assert Specialisation("x", None, {"a": "*fp32", "b": "*bf16"}, {}).dtype == "bf16"
    assert Specialisation("x", None, {"a": "*fp32", "b": "i32"}, {}).dtype == "fp32"
