"""Whatever a client puts into fields: a request whose values are allowed, or an error that names the field."""

from __future__ import annotations

import re
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest

from backend_lib.config import Settings
from backend_lib.request import GenerationRequest, GrammarKind
from backend_lib.router.contract import parse_request
from backend_lib.router.field import Field
from backend_lib.router.fields import ALIASES, FIELDS, TIMEOUT
from backend_lib.router.kinds import BIAS
from backend_lib.router.refusals import RequestError
from tests.support.fuzz import Draw
from tests.support.hashing import VOCAB

NAMES = "|".join([*FIELDS, *ALIASES, TIMEOUT.name, "text_input", "sampling_parameters"])
WORDS = re.compile(rf"'({NAMES})' (is|has|and|are) .*(allowed|only)|unknown field .*; allowed are ", re.DOTALL)
INT64 = range(-(1 << 63), 1 << 64)


def is_parameter(value: Any) -> bool:
    """Whether Triton passes it on: protobuf's numbers, truths and texts."""
    return isinstance(value, bool | float) or (isinstance(value, int) and value in INT64) or type(value) is str


def drawn(number: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors and parameters as the Python backend gives them."""
    draw = Draw(f"1/{number}")
    tensors = {"text_input": np.array([draw.encoded(draw.prompt())], dtype=object)}
    if draw.likely(0.6):
        tensors["sampling_parameters"] = np.array([draw.encoded(draw.sampling_text())], dtype=object)
    for _ in range(draw.randrange(3)):
        name, value = draw.field(0.7)
        tensors[name] = np.array(
            [value] if isinstance(value, bool) else [str(value).encode("utf-8", "replace")], object
        )
    parameters = {name: value for name, value in draw.fields() if is_parameter(value)}
    if draw.likely(0.1) and is_parameter(value := draw.any_value()):
        parameters["timeout"] = value
    return tensors, parameters


@pytest.mark.parametrize("part", range(4))
def test_each_is_a_request_within_bounds_or_an_error_that_names_the_field(part):
    good = 0
    for number in range(part * 3000, (part + 1) * 3000):
        tensors, parameters = drawn(number)
        try:
            request = parse_request(tensors, parameters, "r", 0, Settings(), VOCAB)
        except RequestError as error:
            check_words(str(error), number)
        except BaseException as error:
            raise AssertionError(f"case {number}: {tensors} {parameters}") from error
        else:
            good += 1
            check_request(request, number)
    assert 300 < good < 2700, "most draws should say something"


def check_words(words: str, number: int) -> None:
    assert WORDS.match(words), (number, words)
    assert len(words) < 1200, (number, words)
    words.encode()  # Triton takes no lone surrogates


def check_request(request: GenerationRequest, number: int) -> None:
    """Every value that a field gives is one that the field itself would take, in the nouns' own spelling."""
    request.text.encode()
    for field in (*FIELDS.values(), TIMEOUT):
        holder = {"SamplingParams": request.sampling, "OutputOptions": request.output}.get(
            field.noun.__name__ if field.noun else "", request
        )
        if field.noun:
            value = getattr(holder, field.attribute)
            assert value is None or field.attribute == "grammar" or field.parse(sent(field, value), VOCAB) == value, (
                number,
                field,
            )
    assert 0 <= request.timeout_us <= TIMEOUT.high
    sampling = request.sampling
    assert sampling.max_tokens is None or sampling.min_tokens <= sampling.max_tokens
    assert np.float32(sampling.top_p) > 0
    assert sampling.temperature == 0 or np.float32(1) / np.float32(sampling.temperature) < np.inf
    assert not (request.output.stream and request.output.echo_prompt)
    assert astuple(request)  # plain values throughout
    grammar = sampling.grammar
    assert grammar is None or bool(grammar.source) == (grammar.kind is not GrammarKind.JSON_OBJECT), number


def sent(field: Field, value: Any) -> Any:
    """A parsed value as a client spells it."""
    if field.kind is BIAS:
        return {str(token_id): bias for token_id, bias in value}
    return list(value) if field.is_list else value


def test_what_is_no_number():
    for text in ("1_000", "１２", "0x10", "", " ", "--1", "1e400"):
        for name in ("max_tokens", "temperature", "seed"):
            with pytest.raises(ValueError):
                FIELDS[name].parse(text, VOCAB)


def test_the_least_top_p_is_one_in_float32():
    request = parse_request({"text_input": np.array([b"x"], dtype=object)}, {"top_p": 1e-320}, "", 0, Settings(), VOCAB)
    assert np.float32(request.sampling.top_p) == np.finfo(np.float32).tiny


def test_a_truth_is_not_looked_for_in_what_is_deep():
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    try:
        with pytest.raises(ValueError):
            FIELDS["stream"].parse(deep, VOCAB)
    finally:
        while deep:  # freed one by one: Python frees nested lists by recursion
            deep = deep[0]
