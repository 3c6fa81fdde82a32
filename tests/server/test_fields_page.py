"""What docs/fields.md and docs/structured.md tell their reader to type."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.support.documents import ROOT, for_server, run
from tests.support.server import RunningServer


def answers(page: str, server: RunningServer) -> list[dict[str, Any]]:
    """To the commands of a page."""
    commands = re.findall(r"^    (curl .*(?:\n      .*)*)", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    return [json.loads(run(for_server(command, server))) for command in commands]


def test_the_command_about_constrained_output(server):
    (choice,) = answers("structured.md", server)
    assert choice["text_output"] in ("Is Paris in France? yes", "Is Paris in France? no")


def test_the_commands_of_the_page(server):
    ids, same_ids, logprobs, choice, cancel = answers("fields.md", server)
    assert ids == same_ids and ids["text_output"].startswith("The capital of France is Paris")
    rows = json.loads(logprobs["logprobs"])
    assert next(iter(rows[0].values()))["decoded_token"] == " Paris" and 2 <= len(rows[0]) <= 3
    assert choice["text_output"] in ("Is Paris in France? yes", "Is Paris in France? no")
    assert (cancel["id"], cancel["text_output"]) == ("42", "")
