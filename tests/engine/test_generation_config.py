"""What generation_config.json says, through router and worker."""

import json
from pathlib import Path

import pytest

from backend_lib.request import FinishReason
from tests.support.checkpoints import make_hash_checkpoint
from tests.support.engine import EOS, VOCAB, Ask, running_router

PROMPT = [5, 6, 7]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_hash_checkpoint(tmp_path, vocab_size=VOCAB, eos_token_id=EOS, max_position=256)


def test_its_length_is_the_default_and_no_limit(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 5, "eos_token_id": EOS}))
    default, longer = Ask(PROMPT, {"ignore_eos": True}), Ask(PROMPT, {"ignore_eos": True, "max_tokens": 9})
    with running_router(folder) as router:
        for ask in (default, longer):
            router.submit(ask.inbound())
        longer.check()
        sender = default.sender.wait(30.0)
    assert (sender.error, sender.num_tokens, sender.finish) == (None, 5, FinishReason.LENGTH)


def test_its_temperature_is_overridden_by_the_request(folder: Path) -> None:
    """At temperature 1000 a draw is anything but the best token."""
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 1000.0, "eos_token_id": EOS}))
    greedy = Ask(PROMPT, {"max_tokens": 12})
    drawn = Ask(PROMPT, {"max_tokens": 12, "ignore_eos": True, "seed": 3})
    inbound = drawn.inbound()
    inbound.parameters.pop("temperature")
    with running_router(folder) as router:
        router.submit(greedy.inbound())
        router.submit(inbound)
        greedy.check()
        sender = drawn.sender.wait(30.0)
    assert sender.error is None
    assert not sender.text.endswith(Ask(PROMPT, {"max_tokens": 12, "ignore_eos": True}).expected().text)


def test_what_makes_no_sense_is_a_load_error(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"top_p": 2}))
    with pytest.raises(ValueError, match="asks for sampling that cannot be done: 'top_p' is 2"), running_router(folder):
        pass
