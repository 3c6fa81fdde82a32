"""A checkpoint that lies is a load error of the real server, in words, and what it served before it still serves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backend_lib.models.hash_model import expected_next
from tests.support.checkpoints import TINY_VOCAB, hash_text, make_config_folder, make_hash_checkpoint, make_tiny_gguf
from tests.support.clients import HttpClient
from tests.support.hashing import GREEDY, PROMPT, answer
from tests.support.server import running_server


@pytest.fixture(scope="module")
def client(hash_checkpoint: Path) -> Iterator[HttpClient]:
    # A load that has failed keeps Triton from ending before its time limit.
    flags = ["--exit-timeout-secs=3"]
    with running_server(model=hash_checkpoint, repository_mode="explicit", extra_flags=flags) as server:
        yield HttpClient(server.http_url)


def config_of(model: Path) -> dict[str, Any]:
    router = [{"kind": "KIND_CPU", "count": 1}]
    return {"backend": "python", "instance_group": router, "parameters": {"model": {"string_value": str(model)}}}


def load_error(client: HttpClient, model: Path) -> str:
    """What the server says of a model that it cannot load."""
    answered = client.load(config_of(model))
    assert answered.status_code == 400, answered.text
    return answered.json()["error"]


def test_what_the_router_refuses(client: HttpClient, tmp_path: Path) -> None:
    model = make_tiny_gguf(tmp_path / "liar.gguf", {"output.weight": np.zeros((TINY_VOCAB, 64), np.float32)})
    content = model.read_bytes()
    model.write_bytes(content[:16] + (1 << 63).to_bytes(8, "little") + content[24:])
    error = load_error(client, model)
    assert f"{model} is not a whole GGUF file: {1 << 63} keys; supported are at most" in error
    assert client.generate(PROMPT, max_tokens=3, **GREEDY)["text_output"] == PROMPT + answer(3)


def test_what_the_worker_refuses(client: HttpClient, tmp_path: Path) -> None:
    """The router looks at no tensors. This one has a terabyte, by its header."""
    folder = make_config_folder(tmp_path / "liar", vocab_size=1 << 30, hidden_size=256)
    entry = {"dtype": "F32", "shape": [1 << 30, 256], "data_offsets": [0, 1 << 40]}
    header = json.dumps({"lm_head.weight": entry}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 100)
    assert f"{folder / 'model.safetensors'} is not a whole safetensors file" in load_error(client, folder)
    assert client.generate(PROMPT, max_tokens=3, **GREEDY)["text_output"] == PROMPT + answer(3)


def test_a_tokenizer_with_more_tokens_than_the_model(client: HttpClient, tmp_path: Path) -> None:
    """The prompts that need one are refused; reading its embedding would end the worker."""
    folder = make_hash_checkpoint(tmp_path / "few", vocab_size=100)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 90}))
    assert client.load(config_of(folder)).status_code == 200
    status, error = client.error(hash_text([5, 90, 6]))
    assert status == 400
    assert f"'text_input' has the token '{hash_text([90])}', whose id is 90; allowed are ids below 90" in error
    ids = [5, 89, 6]
    said = client.generate(hash_text(ids), max_tokens=1, **GREEDY)["text_output"]
    assert said == hash_text([*ids, expected_next(ids, 90)])
