"""docs/fields.md says what the table of fields says, and names tests that exist."""

from __future__ import annotations

import ast

import pytest

from backend_lib.router.fields import ALIASES, FIELDS
from tests.support import fields_page

ROOT = fields_page.PAGE.parents[1]


def test_the_page_has_every_field_input_and_output():
    page = fields_page.PAGE.read_text()
    assert page == fields_page.written(page), "python -m tests.support.fields_page writes it"


def test_every_field_has_a_test():
    assert fields_page.TESTS.keys() == FIELDS.keys()


@pytest.mark.parametrize("test", sorted(set(fields_page.TESTS.values())))
def test_a_test_that_is_named_exists(test):
    path, name = test.split("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("alias", ALIASES)
def test_every_other_name_stands_in_its_fields_row(alias):
    (row,) = [line for line in fields_page.fields_table().splitlines() if line.startswith(f"| `{ALIASES[alias]}` |")]
    assert f"`{alias}`" in row
