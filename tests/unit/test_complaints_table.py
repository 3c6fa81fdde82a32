"""docs/complaints.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "complaints.md").read_text()
_NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
NAMED = sorted(set(_NAMED.findall(PAGE)))


def names_in(path: Path) -> set[str]:
    """Names of the test functions in a file."""
    nodes = ast.walk(ast.parse(path.read_text()))
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return {name for name in names if name.startswith("test_")}


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_test_that_is_named_exists(path: str, name: str) -> None:
    assert name in names_in(ROOT / path)


def rows() -> list[list[str]]:
    """The cells of all tables of the page, headings left out."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] not in ("complaint", "---")]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_every_complaint_has_tests_or_does_not_apply(row: list[str]) -> None:
    complaint, here, tests = row
    assert "https://github.com/" in complaint and here
    # Nothing but names of this form, so that none is passed over.
    assert tests == "does not apply" or all(map(_NAMED.fullmatch, tests.split(", ")))


def test_the_table_is_found() -> None:
    assert len(rows()) > 40
    assert len(NAMED) > 40
