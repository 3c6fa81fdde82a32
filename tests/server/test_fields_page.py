"""What docs/fields.md tells its reader to type."""

from __future__ import annotations

import json
import re

from tests.support.documents import ROOT, for_server, run


def test_the_commands_of_the_page(server):
    page = (ROOT / "docs" / "fields.md").read_text()
    commands = re.findall(r"^    (curl .*(?:\n      .*)*)", page, re.MULTILINE)
    logprobs, choice, cancel = (json.loads(run(for_server(command, server))) for command in commands)
    rows = json.loads(logprobs["logprobs"])
    assert next(iter(rows[0].values()))["decoded_token"] == " Paris" and 2 <= len(rows[0]) <= 3
    assert choice["text_output"] in ("Is Paris in France? yes", "Is Paris in France? no")
    assert (cancel["id"], cancel["text_output"]) == ("42", "")
