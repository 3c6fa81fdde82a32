"""What docs/chat.md tells a reader to type works as it stands there, but for the ports."""

from __future__ import annotations

import json
import re
import sys

from backend_lib.router.chat.messages import parse_messages
from tests.support.clients import HttpClient
from tests.support.documents import ROOT, for_server, run

PAGE = (ROOT / "docs/chat.md").read_text()
HTTP, GRPC, RESULT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_curl_line_answers(server):
    command = re.search(r"^    (curl .*?}')$", PAGE, re.DOTALL | re.MULTILINE).group(1)
    answer = json.loads(run(for_server(command, server)))
    assert "Tokyo" in answer["text_output"]
    assert "<|im_start|>" not in answer["text_output"]


def test_the_python_clients_print_the_answer(server):
    for code in (HTTP, GRPC):
        assert "Tokyo" in run([sys.executable, "-c", for_server(code, server)])


def test_the_conversation_with_a_result_is_one():
    values: dict = {}
    exec(RESULT, values)
    messages = parse_messages(values["messages"])
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"place": "Bern"}


def test_the_conversation_with_a_result_is_answered(server):
    values: dict = {}
    exec(RESULT, values)
    body = {"messages": values["messages"], "max_tokens": 4, "return_num_output_tokens": True}
    assert HttpClient(server.http_url).generate(None, **body)["num_output_tokens"] >= 1
