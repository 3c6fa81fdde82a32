"""What lies in a slot's extent, and where."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from backend_lib.arena.layout import logprob_row
from backend_lib.request import GenerationRequest, SamplingParams

# What the worker reads of these from the blob, and only where they are not the noun's default.
_IN_BLOB = (
    "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids",
)  # fmt: skip
_DEFAULTS = SamplingParams()


class Extent(NamedTuple):
    """Offsets from the extent's start: the parameter blob, prompt ids, output ids, and rows of log-probabilities."""

    prompt: int
    output: int
    logprobs: int
    logprob_width: int
    prompt_logprobs: int
    prompt_logprob_width: int
    num_bytes: int

    def fields(self, start: int) -> dict[str, int]:
        """The slot's fields for an extent that begins at `start`."""
        return {
            "params_offset": start,
            "prompt_offset": start + self.prompt,
            "output_offset": start + self.output,
            "logprob_offset": start + self.logprobs,
            "logprob_width": self.logprob_width,
            "prompt_logprob_offset": start + self.prompt_logprobs,
            "prompt_logprob_width": self.prompt_logprob_width,
        }


def extent_for(
    sampling: SamplingParams, params_bytes: int, prompt_len: int, max_tokens: int, *, is_leader: bool, vocab_size: int
) -> Extent:
    """Room for one sequence. The prompt's log-probabilities are the leader's alone: they are all the same."""
    width = _width(sampling.logprobs, vocab_size)
    prompt_width = _width(sampling.prompt_logprobs, vocab_size) if is_leader else 0
    prompt = -(-params_bytes // 8) * 8
    output = prompt + 4 * prompt_len
    logprobs = output + 4 * max_tokens
    prompt_logprobs = logprobs + logprob_row(width).itemsize * max_tokens if width else logprobs
    prompt_row_bytes = logprob_row(prompt_width).itemsize if prompt_width else 0
    return Extent(
        prompt, output, logprobs, width, prompt_logprobs, prompt_width,
        num_bytes=prompt_logprobs + prompt_row_bytes * prompt_len,
    )  # fmt: skip


def _width(count: int | None, vocab_size: int) -> int:
    """Of a row: the token itself and `count` more; 0 is off."""
    return 0 if count is None else 1 + min(count, vocab_size)


def parameter_blob(request: GenerationRequest, bad_words: Sequence[Sequence[int]], leader_generation: int) -> bytes:
    """What has no fixed place in a slot."""
    sampling = request.sampling
    blob: dict[str, Any] = {
        "stop_token_ids": sampling.stop_token_ids,
        "prefix_cache": not request.disable_prompt_cache,
        "leader_generation": leader_generation,
    }
    for name in _IN_BLOB:
        if (value := getattr(sampling, name)) != getattr(_DEFAULTS, name):
            blob[name] = value
    if bad_words:
        blob["bad_words"] = bad_words
    if sampling.grammar:
        blob["grammar"] = {"kind": sampling.grammar.kind.value, "source": sampling.grammar.source}
    return json.dumps(blob).encode()
