"""A sequence as a worker sees it: what to compute, how far the steps have come, and what has been published."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from backend_lib.arena import SlotRef, SlotTable
from backend_lib.request import FinishReason, Grammar, GrammarKind
from backend_lib.worker.grammar import CompiledGrammar, GrammarState
from backend_lib.worker.logit_rules import LogitRules
from backend_lib.worker.prefix_cache import Node


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One slot's sequence.

    `prompt_ids` and `output_ids` are int32 views of the arena. Two cursors move: `num_computed` when a step is planned
    (its keys and values count as written from then on, for whatever is planned later runs later), and `output_len` when
    a step is finalized and its token is known.
    """

    slot: int
    generation: int
    prompt_ids: np.ndarray
    output_ids: np.ndarray
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sequence_index: int = 0
    adapter_id: int = 0
    rules: LogitRules | None = None
    grammar: Grammar | None = None
    grammar_state: GrammarState | None = None  # there once the grammar is compiled
    logprobs: np.ndarray | None = None  # rows of the arena, one an output token
    prompt_logprobs: np.ndarray | None = None  # and one a prompt token
    use_cache: bool = True  # read the prefix cache, and leave what was computed in it
    leader_ref: SlotRef | None = None
    leader: Sequence | None = None  # the sibling that computes the prompt for this one
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()

    row: int = -1
    num_computed: int = 0
    num_planned: int = 0  # output tokens that planned steps have sampled or will sample
    output_len: int = 0
    finish: FinishReason = FinishReason.NONE  # on every rank in the same step
    grammar_finish: FinishReason = FinishReason.NONE  # rank 0's: it alone follows grammars, and tells the others
    grammar_len: int = 0  # output tokens until then: the steps until all ranks know of it go on for nobody
    error: str = ""  # in words for the client, when that is the finish
    last_step: int = -1  # newest planned step that holds this sequence
    pausing: bool = False  # leaves the plans to give its KV to older sequences
    num_pauses: int = 0
    num_lost: int = 0  # tokens that were computed when it was paused
    arrival: int = 0  # its place among all that came
    overtaken: int = 0  # sequences behind it that started before it
    num_shared: int = 0  # leading tokens whose KV indices belong to the prefix cache
    node: Node | None = None  # its locked end in the prefix cache
    cached_indices: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int32))  # int32, where it began
    is_special: bool = field(init=False)  # asks the sampler for more than temperature, top-k and top-p
    known_len: int = field(init=False)  # tokens whose ids the CPU knew at admission; beyond lies the relay table

    def __post_init__(self) -> None:
        self.known_len = len(self.prompt_ids) + self.output_len
        self.num_planned = self.output_len
        wishes = (self.rules, self.grammar, self.logprobs is not None, self.min_p, self.min_tokens)
        self.is_special = any(wishes)

    @classmethod
    def from_slot(
        cls, slots: SlotTable, slot: int, output_len: int, eos_token_ids: frozenset[int], *, keeps_slot: bool = True
    ) -> Sequence:
        """Read a slot's half of the router. The `output_len` tokens that an earlier worker had published are the
        sequence's beginning; how many says the router, for rank 0 may have published more when another rank reads.

        `keeps_slot`: the sequence goes on to read and write it, as rank 0 does, whose word gives it back. Others may be
        a step behind that word, so they keep a copy, and write nothing.
        """
        header = slots.headers[slot]
        params = json.loads(slots.params(slot))
        arrays = _Arrays.of(slots, slot)
        arrays = arrays if keeps_slot else arrays.apart()
        return cls(
            slot=slot,
            generation=int(header["generation"]),
            **arrays._asdict(),
            max_tokens=int(header["max_tokens"]),
            min_tokens=int(header["min_tokens"]),
            temperature=float(header["temperature"]),
            top_k=int(header["top_k"]),
            top_p=float(header["top_p"]),
            min_p=params.get("min_p", 0.0),
            seed=int(header["seed"]),
            sequence_index=int(header["sequence_index"]),
            leader_ref=_leader_ref(header, params),
            adapter_id=int(header["adapter_id"]),
            rules=LogitRules.from_blob(params),
            grammar=_grammar(params),
            # What is found in the cache has no logits.
            use_cache=params.get("prefix_cache", True) and arrays.prompt_logprobs is None,
            eos_token_ids=frozenset() if header["ignore_eos"] else eos_token_ids,
            stop_token_ids=frozenset(params["stop_token_ids"]),
            output_len=output_len,
        )

    def follow(self, grammar: CompiledGrammar) -> None:
        """Match the output with a grammar, from what has been published on.

        Raises ValueError when the grammar does not allow that, or takes too long to follow it.
        """
        self.grammar_state = GrammarState(grammar, self.output_ids[: self.output_len].tolist())

    def rewind(self) -> None:
        """Begin again from the tokens published so far, holding nothing: the sequence has been paused."""
        self.row = -1
        self.num_lost = self.num_computed
        self.num_computed = 0
        self.pausing = False
        self.num_pauses += 1
        self.known_len = len(self.prompt_ids) + self.output_len
        self.num_planned = self.output_len

    @property
    def told_finish(self) -> FinishReason:
        """What the client is told, as soon as the token that ends it is known."""
        return self.grammar_finish or self.finish

    @property
    def told_len(self) -> int:
        """Output tokens that are the client's."""
        return self.grammar_len if self.grammar_finish else self.output_len

    @property
    def prompt_computed(self) -> bool:
        """Whether others can read the prompt's KV: the step that completes it has been planned."""
        return self.num_computed >= len(self.prompt_ids)

    @property
    def kv_need(self) -> int:
        """KV indices the sequence can ever hold: the last token is sampled but never computed."""
        return len(self.prompt_ids) + self.max_tokens - 1

    @property
    def prefilling(self) -> bool:
        return self.num_computed < self.known_len

    @property
    def exhausted(self) -> bool:
        """Every token it may produce is already planned."""
        return self.num_planned >= self.max_tokens

    @property
    def banned_token_ids(self) -> set[int] | frozenset[int]:
        """Tokens that the next draw must not give, once all before it are known: they would end the sequence before
        `min_tokens`, or complete a bad word."""
        too_early = self.output_len < self.min_tokens
        early = self.stop_token_ids | self.eos_token_ids if too_early else frozenset()
        if self.rules is None or not self.rules.bad_words:
            return early
        return early.union(self.rules.banned_after(self.output_ids[: self.output_len].tolist()))

    def known_ids(self, start: int, stop: int) -> np.ndarray:
        """int32 [stop - start], prompt ids and then outputs that have been published."""
        prompt_len = len(self.prompt_ids)
        if stop <= prompt_len:
            return self.prompt_ids[start:stop]
        tail = self.output_ids[max(start - prompt_len, 0) : stop - prompt_len]
        return np.concatenate([self.prompt_ids[start:], tail])

    def accept(self, token_id: int) -> None:
        """Take a sampled token: the sequence's next output, and perhaps its end."""
        self.output_ids[self.output_len] = token_id
        self.output_len += 1
        if token_id in self.eos_token_ids:
            self.finish = FinishReason.EOS
        elif token_id in self.stop_token_ids:
            self.finish = FinishReason.STOP_TOKEN
        elif self.output_len >= self.max_tokens:
            self.finish = FinishReason.LENGTH
        if self.grammar_state is not None and not self.grammar_finish:
            self._follow_to(self.grammar_state, token_id)

    def _follow_to(self, state: GrammarState, token_id: int) -> None:
        if self.finish in (FinishReason.EOS, FinishReason.STOP_TOKEN):
            return
        self.error, self.grammar_len = _error_of(state, token_id), self.output_len
        if self.error:
            self.grammar_finish = FinishReason.ERROR
        elif state.is_over:
            self.grammar_finish = FinishReason.GRAMMAR


class _Arrays(NamedTuple):
    """A slot's extent, as a sequence names its parts."""

    prompt_ids: np.ndarray
    output_ids: np.ndarray
    logprobs: np.ndarray | None
    prompt_logprobs: np.ndarray | None

    @classmethod
    def of(cls, slots: SlotTable, slot: int) -> _Arrays:
        return cls(slots.prompt_ids(slot), slots.output_ids(slot), slots.logprobs(slot), slots.prompt_logprobs(slot))

    def apart(self) -> _Arrays:
        """Copies; of log-probabilities only that they are wanted, for nobody reads them there."""
        told = None if self.prompt_logprobs is None else np.empty(0, self.prompt_logprobs.dtype)
        return _Arrays(self.prompt_ids.copy(), self.output_ids.copy(), None, told)


def _error_of(state: GrammarState, token_id: int) -> str:
    """Take the next token; why a sequence cannot go on with its grammar, if it cannot."""
    if not state.accept(token_id):
        return "no token is allowed by both the grammar and the request's other fields"
    if state.is_stuck:
        return "no token of this model leads to a text that the grammar allows"
    return "the grammar takes too long to follow" if state.is_too_slow else ""


def _grammar(params: dict[str, Any]) -> Grammar | None:
    given = params.get("grammar")
    return Grammar(kind=GrammarKind(given["kind"]), source=given["source"]) if given else None


def _leader_ref(header: np.void, params: dict[str, Any]) -> SlotRef | None:
    """The slot of the sibling that computes the prompt; None for that one itself."""
    if not header["sequence_index"]:
        return None
    return SlotRef(int(header["leader_slot"]), params["leader_generation"])
