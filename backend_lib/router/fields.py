"""Every field a client may set, in one table: its kind, what is allowed, where it goes and what it means.

A new field is one line in `_TABLE`, an attribute of the noun it goes to, and its use.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from backend_lib.request import GenerationRequest, OutputOptions, SamplingParams

INT32_MAX = (1 << 31) - 1
MAX_LIST = 64
MAX_N = 64
MAX_STOP_CHARS = 1024

# More than all fields at their longest need. Python parses JSON without letting other threads run.
_MAX_JSON_CHARS = 1 << 20

# Longer than any number that fits a field, shorter than what Python refuses to convert.
_MAX_NUMBER_CHARS = 64
_WHOLE = re.compile(r"[+-]?[0-9]+")
_TRUTH = {"true": True, "1": True, "false": False, "0": False}

# Keys that Triton, its clients and its proxies put among the request parameters; they are not ours to judge.
_TRITON_PARAMETERS = frozenset(
    {"binary_data_output", "headers", "id", "priority", "sequence_end", "sequence_id", "sequence_start", "timeout"}
)


def is_triton_parameter(key: str) -> bool:
    """Whether a request parameter belongs to the server. A hyphen marks a forwarded HTTP header; no field has one."""
    return key in _TRITON_PARAMETERS or key.startswith("triton_") or "-" in key


def load_json(text: str) -> Any:
    """Parse JSON from a client. Raises ValueError, also for what nests too deep or is too long."""
    if len(text) > _MAX_JSON_CHARS:
        raise ValueError(f"more than {_MAX_JSON_CHARS} characters")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    except json.JSONDecodeError:
        raise
    except ValueError:
        raise ValueError("a number too long") from None


def _integer(raw: Any) -> int:
    """A whole number from 128, 128.0, "128" or "128.0". A boolean is a mistake, not a number."""
    if isinstance(raw, str) and _WHOLE.fullmatch(raw.strip()) and len(raw) <= _MAX_NUMBER_CHARS:
        return int(raw)
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    value = _number(raw)
    if not value.is_integer():
        raise ValueError("not a whole number")
    return int(value)


def _number(raw: Any) -> float:
    """A finite number from 0.7, 1, or "0.7"."""
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise ValueError("not a number")
    if isinstance(raw, str) and ("_" in raw or not raw.isascii()):
        raise ValueError("a number in Python's spelling, not in JSON's")
    try:
        value = float(raw)
    except OverflowError:
        raise ValueError("too large") from None
    if not math.isfinite(value):
        raise ValueError("not finite")
    return value


def _truth(raw: Any) -> bool:
    """A boolean from true, 1, or "true" and "1" in any case."""
    # Any other type is not written out: a list may be nested too deep or too long for that.
    text = str(raw).strip().lower() if isinstance(raw, bool | int | str) else ""
    if text not in _TRUTH:
        raise ValueError("not a boolean")
    return _TRUTH[text]


def _strings(raw: Any) -> tuple[str, ...]:
    """Strings from a list, or from one string, which is itself the only one unless it is a JSON list of strings."""
    if isinstance(raw, str):
        raw = _json_strings(raw)
    if not isinstance(raw, list) or not all(isinstance(item, str) for item in raw):
        raise ValueError("not strings")
    for item in raw:
        item.encode()  # a lone surrogate, which JSON can spell, raises UnicodeEncodeError (a ValueError)
    return tuple(raw)


def _json_strings(text: str) -> list[str]:
    """The generate endpoint refuses lists as parameters, so clients send them as JSON text."""
    try:
        value = load_json(text) if text.lstrip().startswith("[") else text
    except ValueError:
        return [text]
    return value if isinstance(value, list) and all(isinstance(item, str) for item in value) else [text]


def _integers(raw: Any) -> tuple[int, ...]:
    """Whole numbers from a list, a JSON list as text, or a number alone."""
    if isinstance(raw, str) and raw.lstrip().startswith("["):
        raw = load_json(raw)
    return tuple(_integer(item) for item in (raw if isinstance(raw, list) else [raw]))


@dataclass(frozen=True, kw_only=True)
class Field:
    """One request field.

    Attributes:
        name: what the client calls it.
        kind: turns a client's value into ours. Raises ValueError.
        low, high: bounds of a number, of each number of a list, or of each string's length. `high` None is the
            vocabulary's last id.
        above: `low` itself is not allowed.
        noun: the dataclass it is an attribute of. None: the contract interprets it, or it is not supported and only
            the value that leaves it off passes.
        attribute: its name there.
        help: what it means.
    """

    name: str
    kind: Callable[[Any], Any]
    low: float = 0
    high: float | None = 1
    above: bool = False
    noun: type | None = None
    attribute: str = ""
    help: str = ""

    @property
    def is_list(self) -> bool:
        return self.kind in (_strings, _integers)

    @property
    def is_supported(self) -> bool:
        return self.low != self.high

    @property
    def default(self) -> Any:
        """The noun's default: values that were not given are not passed to it."""
        specs = dataclasses.fields(self.noun) if self.noun else ()
        return next((spec.default for spec in specs if spec.name == self.attribute), None)

    def parse(self, raw: Any, vocab_size: int) -> Any:
        """The client's value as ours. Raises ValueError when it is not what `allowed` says."""
        value = self.kind(raw)
        if len(value if self.is_list else ()) > MAX_LIST:
            raise ValueError("too many")
        for item in value if self.is_list else (value,):
            self._check(len(item) if isinstance(item, str) else item, vocab_size)
        return value

    def _check(self, number: float, vocab_size: int) -> None:
        high = vocab_size - 1 if self.high is None else self.high
        if not self.low <= number <= high or (self.above and number == self.low):
            raise ValueError("out of range")

    def allowed(self, vocab_size: int) -> str:
        """What an error tells the client to send."""
        if not self.is_supported:
            off = "an empty list" if self.is_list else str(self.kind(self.low)).lower()
            return f"only {off} is supported"
        high = vocab_size - 1 if self.high is None else self.high
        first, last = _written(self.low), _written(high)
        span = f"above {first} up to {last}" if self.above else f"from {first} to {last}"
        return f"allowed is {_WORDS[self.kind].format(span=span, count=MAX_LIST)}"


def _written(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:.20g}"


_WORDS: dict[Callable[[Any], Any], str] = {
    _integer: "a whole number {span}",
    _number: "a number {span}",
    _truth: "true or false",
    _strings: "a string or a list of at most {count} strings, each {span} characters long",
    _integers: "a list of at most {count} whole numbers, each {span}",
}


def _sampling(name: str, kind: Callable[[Any], Any], low: float = 0, high: float | None = 1, **more: Any) -> Field:
    return Field(name=name, kind=kind, low=low, high=high, noun=SamplingParams, attribute=name, **more)


def _output(name: str, kind: Callable[[Any], Any], attribute: str, **more: Any) -> Field:
    return Field(name=name, kind=kind, noun=OutputOptions, attribute=attribute, **more)


def _request(name: str, kind: Callable[[Any], Any], attribute: str, **more: Any) -> Field:
    return Field(name=name, kind=kind, noun=GenerationRequest, attribute=attribute, **more)


def _only(name: str, kind: Callable[[Any], Any], value: float) -> Field:
    """A field that clients send at the value which leaves it off, as Triton's OpenAI frontend does."""
    return Field(name=name, kind=kind, low=value, high=value)


_TABLE = (
    _sampling("max_tokens", _integer, 1, INT32_MAX, help="output tokens at most; the server's default if not given"),
    _sampling("min_tokens", _integer, 0, INT32_MAX, help="output tokens before anything but the length may end it"),
    _sampling("temperature", _number, 0, 1e6, help="0 is greedy; below 1 sharpens, above 1 flattens"),
    _sampling("top_k", _integer, -1, INT32_MAX, help="draw from the k most likely tokens; 0 or -1 is all"),
    _sampling("top_p", _number, 0, 1, above=True, help="draw from the fewest tokens that hold this probability"),
    _sampling("seed", _integer, -(1 << 63), (1 << 64) - 1, help="repeats a draw; -1 is none, other negatives wrap"),
    _sampling("ignore_eos", _truth, help="go on after the end-of-sequence token"),
    _sampling("n", _integer, 1, MAX_N, help="sequences to draw from the prompt, which is computed once"),
    _sampling("stop", _strings, 1, MAX_STOP_CHARS, help="texts that end the output, which does not contain them"),
    _sampling("stop_token_ids", _integers, 0, None, help="token ids that end the output"),
    _output("stream", _truth, "stream", help="one response per step instead of one in all"),
    _output("return_finish_reason", _truth, "finish_reason", help="send the output finish_reason"),
    _output("return_num_input_tokens", _truth, "num_input_tokens", help="send the output num_input_tokens"),
    _output("return_num_output_tokens", _truth, "num_output_tokens", help="send the output num_output_tokens"),
    _output("return_num_cached_tokens", _truth, "num_cached_tokens", help="send the output num_cached_tokens"),
    _output("stream_interval", _integer, "stream_interval", low=1, high=INT32_MAX, help="tokens per response at least"),
    _request("request_priority", _integer, "priority", low=-INT32_MAX, high=INT32_MAX, help="higher goes first"),
    _request("disable_prompt_cache", _truth, "disable_prompt_cache", help="do not read or fill the prefix cache"),
    Field(name="exclude_input_in_output", kind=_truth, help="leave the prompt out; without streaming it comes first"),
    _only("best_of", _integer, 1),
    _only("min_p", _number, 0),
    _only("presence_penalty", _number, 0),
    _only("frequency_penalty", _number, 0),
    _only("repetition_penalty", _number, 1),
    _only("length_penalty", _number, 1),
    _only("use_beam_search", _truth, 0),
    _only("include_stop_str_in_output", _truth, 0),
    _only("skip_special_tokens", _truth, 1),
    _only("logprobs", _truth, 0),
    _only("return_logprobs", _truth, 0),
    _only("return_cumulative_logprob", _truth, 0),
    _only("image", _strings, 0),
)

# Triton reads this parameter of a gRPC request itself, and leaves that of a generate request to us.
TIMEOUT = Field(name="timeout", kind=_integer, low=0, high=(1 << 63) - 1, help="microseconds; 0 is no deadline")

FIELDS: dict[str, Field] = {entry.name: entry for entry in _TABLE}
