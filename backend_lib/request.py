"""The nouns of a request. Everything that crosses from the client's words to the worker's is named here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any


class FinishReason(IntEnum):
    """Why a sequence ended. The number is what the arena stores; `text` is what the client reads."""

    NONE = 0
    EOS = 1
    STOP_TOKEN = 2
    STOP_STRING = 3
    LENGTH = 4
    CANCELLED = 5
    DEADLINE = 6
    ERROR = 7
    INVALID = 8  # an error that is the client's mistake, found by the worker
    GRAMMAR = 9  # the output matches, and nothing can follow

    @property
    def text(self) -> str:
        """The words vLLM uses, so that a client of vllm_backend reads what it expects."""
        return _FINISH_TEXT[self]


_FINISH_TEXT = {
    FinishReason.NONE: "None",
    FinishReason.EOS: "stop",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.DEADLINE: "abort",
    FinishReason.ERROR: "error",
    FinishReason.INVALID: "error",
    FinishReason.GRAMMAR: "stop",
}


class GrammarKind(str, Enum):
    """What a constraint on the output is written in."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """What the output must match. `source`: the schema as JSON text, the expression, the grammar, the choices as a
    JSON list; empty for any JSON object. `field`: the client's name of where it stands, for errors."""

    kind: GrammarKind
    source: str = ""
    field: str = field(default="", compare=False)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when the sequence ends.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 keep the whole vocabulary. `max_tokens` None means the
    server's default. `seed` None means that the router draws one. `n` sequences are drawn from one prompt.
    `logit_bias` is pairs of token id and what is added to its logit. `allowed_token_ids`, where not empty, are the only
    ones. `logprobs` None is off, 0 is the chosen token's alone, k adds the k most likely; `prompt_logprobs` likewise.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What the client wants to see, and how finely. `echo_prompt` puts the prompt before the generated text."""

    stream: bool = False
    echo_prompt: bool = False
    finish_reason: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    num_cached_tokens: bool = False
    logprobs: bool = False
    cumulative_logprob: bool = False
    prompt_logprobs: bool = False
    output_ids: bool = False
    reasoning_content: bool = False
    tool_calls: bool = False
    stream_interval: int = 1


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation as the client sent it; the checkpoint's template says what of it is allowed. `variables` are
    further ones of the template.
    """

    messages: Any
    tools: Any = None
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One client request, parsed and validated. Its prompt is one of `text`, `prompt_ids` and `chat`.

    `timeout_us` 0 means no deadline; a higher `priority` goes first.

    `disable_prompt_cache`: neither read the prefix cache nor leave anything in it.

    `dp_rank`: the group of workers that computes it; None leaves the choice to the router.

    `names`: what the client called a field, by the field's name.
    """

    request_id: str
    text: str = ""
    prompt_ids: tuple[int, ...] = ()
    chat: Chat | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    output: OutputOptions = field(default_factory=OutputOptions)
    priority: int = 0
    disable_prompt_cache: bool = False
    dp_rank: int | None = None
    timeout_us: int = 0
    names: Mapping[str, str] = field(default_factory=dict, compare=False)

    def called(self, name: str) -> str:
        """A field's name in an error."""
        return self.names.get(name, name)
