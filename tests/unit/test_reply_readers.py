"""Which parsers take replies apart: the settings say, or the checkpoint's template."""

from __future__ import annotations

from dataclasses import fields

import pytest

from backend_lib.checkpoint import open_checkpoint
from backend_lib.config import Settings
from backend_lib.router.chat import REASONING_PARSER_NAMES, TOOL_PARSER_NAMES, ChatTemplate
from backend_lib.router.reply_readers import ReplyReaders
from tests.support.checkpoints import make_hash_checkpoint

CHOICES = {spec.name: spec.metadata.get("choices") for spec in fields(Settings)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return open_checkpoint(str(make_hash_checkpoint(tmp_path_factory.mktemp("hash") / "hash")))


def test_the_settings_know_every_parser() -> None:
    assert CHOICES["tool_parser"] == TOOL_PARSER_NAMES
    assert CHOICES["reasoning_parser"] == REASONING_PARSER_NAMES


@pytest.mark.parametrize("tool_parser", TOOL_PARSER_NAMES[1:])
@pytest.mark.parametrize("reasoning_parser", REASONING_PARSER_NAMES[1:])
def test_a_setting_is_followed(checkpoint, tool_parser: str, reasoning_parser: str) -> None:
    settings = Settings(tool_parser=tool_parser, reasoning_parser=reasoning_parser)
    reply_format = ReplyReaders(settings, checkpoint, ChatTemplate.of(checkpoint)).format
    assert (reply_format.tool_parser, reply_format.reasoning_parser) == (tool_parser, reasoning_parser)
