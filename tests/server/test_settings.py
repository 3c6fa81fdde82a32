"""Settings as an operator gives them: in config.pbtxt, and over the model-load API."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from backend_lib.cli.repository import shipped_repository
from backend_lib.config import Settings
from tests.server.conftest import LONG_CONTEXT
from tests.support.clients import HttpClient
from tests.support.hashing import GREEDY, PROMPT, answer
from tests.support.server import RunningServer, running_server

ROUTER = [{"kind": "KIND_CPU", "count": 1}]


@pytest.fixture(scope="module")
def explicit(hash_checkpoint: Path) -> Iterator[RunningServer]:
    """A server whose model is loaded and unloaded by the tests."""
    # A load that has failed keeps Triton from ending before its time limit.
    flags = ["--exit-timeout-secs=3"]
    with running_server(model=hash_checkpoint, repository_mode="explicit", extra_flags=flags) as running:
        yield running


@pytest.fixture
def client(explicit: RunningServer) -> HttpClient:
    return HttpClient(explicit.http_url)


def config(model: object, *, group: list[dict[str, Any]] = ROUTER, **settings: object) -> dict[str, Any]:
    """A configuration for the model-load API, with no more in it than an operator wants to say."""
    values = {"model": model} | settings
    parameters = {key: {"string_value": str(value)} for key, value in values.items()}
    return {"backend": "python", "instance_group": group, "parameters": parameters}


def load_error(client: HttpClient, given: dict[str, Any]) -> str:
    answered = client.load(given)
    assert answered.status_code == 400, answered.text
    return answered.json()["error"]


def test_an_unknown_key_lists_what_is_allowed(explicit, client, hash_checkpoint):
    error = load_error(client, config(hash_checkpoint, max_runing=4))
    assert "unknown parameter 'max_runing' (did you mean 'max_running'?); allowed are" in error
    assert all(spec.name in error for spec in fields(Settings))
    assert "unknown parameter 'max_runing'" in explicit.log


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_running": 0}, "parameter 'max_running' is '0'; allowed is a whole number from 1 to 4096"),
        (
            {"max_model_len": LONG_CONTEXT + 1},
            f"parameter 'max_model_len' is {LONG_CONTEXT + 1}; allowed is at most {LONG_CONTEXT}",
        ),
    ],
)
def test_a_bad_value_says_what_is_allowed(client, hash_checkpoint, settings, words):
    assert words in load_error(client, config(hash_checkpoint, **settings))


def test_a_missing_model_is_named_and_the_one_of_before_still_answers(client):
    assert "/no/such/model.gguf" in load_error(client, config("/no/such/model.gguf"))
    assert client.index()["state"] == "READY"
    assert client.generate(PROMPT, max_tokens=3, **GREEDY)["text_output"] == PROMPT + answer(3)


def test_a_folder_that_is_no_checkpoint_is_named(client, tmp_path):
    assert str(tmp_path) in load_error(client, config(tmp_path))


@pytest.mark.parametrize(("group", "words"), [
    ([{"kind": "KIND_CPU", "count": 2}], "allowed is [ { kind: KIND_CPU, count: 1 } ]: the one router runs on the CPU"),
    # On a machine without GPUs Triton says it before the model can.
    ([{"kind": "KIND_GPU", "count": 1}], "KIND_GPU"),
])  # fmt: skip
def test_other_instance_groups_are_refused_with_the_reason(client, hash_checkpoint, group, words):
    assert words in load_error(client, config(hash_checkpoint, group=group))


def test_the_load_api_overrides_settings(client, hash_checkpoint):
    """Other settings at the same time, and no tensors: Triton takes the given configuration for the whole of it."""
    given = config(hash_checkpoint, default_max_tokens=4, max_model_len=64, kv_tokens=48, EXECUTION_ENV_PATH="")
    answered = client.load(given)
    assert answered.status_code == 200, answered.text
    assert client.generate(PROMPT, **GREEDY)["text_output"] == PROMPT + answer(4)
    assert "allowed are at most 47, so that one more fits in 48" in client.error("丅" * 48)[1]
    pieces = list(client.stream(PROMPT, max_tokens=3, **GREEDY))
    assert "".join(piece["text_output"] for piece in pieces) == answer(3)


def test_a_config_that_leaves_the_tensors_out_is_completed_to_the_shipped_one(client, hash_checkpoint):
    keys = ("input", "output", "max_batch_size", "model_transaction_policy")
    assert client.load().status_code == 200
    shipped = {key: client.config()[key] for key in keys}
    assert client.load(config(hash_checkpoint)).status_code == 200
    assert {key: client.config()[key] for key in keys} == shipped
    assert shipped["input"][0]["name"] == "text_input"


def test_the_shipped_model_may_be_copied_under_another_name(tmp_path, hash_checkpoint):
    """Two models of one server, as the comment in config.pbtxt says."""
    repository = tmp_path / "repository"
    for name in ("llm", "other"):
        shutil.copytree(shipped_repository() / "llm", repository / name, symlinks=True)
        path = repository / name / "config.pbtxt"
        path.write_text(path.read_text().replace('"smollm2"', f'"{hash_checkpoint}"'))
    with running_server(repository=repository, model=hash_checkpoint) as server:
        for name in ("llm", "other"):
            answered = HttpClient(server.http_url, name).generate(PROMPT, max_tokens=3, **GREEDY)
            assert answered["text_output"] == PROMPT + answer(3)


def test_a_bad_setting_in_config_pbtxt_stops_the_server_with_the_reason(hash_checkpoint):
    with (
        pytest.raises(
            AssertionError, match="parameter 'max_running' is '-1'; allowed is a whole number from 1 to 4096"
        ),
        running_server(model=hash_checkpoint, settings={"max_running": -1}),
    ):
        pass
