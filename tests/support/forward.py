"""Runs a decoder without the worker: sequences, rows and scattered KV indices."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from backend_lib.models import Decoder, ForwardBatch
from backend_lib.models.batch import chunk_words


class ForwardDriver:
    """Keeps sequences by row. KV indices are drawn at random, and the pool starts as garbage, so that a read of
    anything but a sequence's own entries shows."""

    def __init__(self, decoder: Decoder, *, rows: int = 8, max_len: int = 128, seed: int = 0) -> None:
        self.decoder = decoder
        self.random = random.Random(seed)
        kv_tokens = rows * max_len
        self.kv = decoder.allocate_kv(kv_tokens)
        for pool in [self.kv] if isinstance(self.kv, torch.Tensor) else self.kv:
            pool.fill_(float("nan") if pool.is_floating_point() else 0x5A5A5A5A)
        self.free = self.random.sample(range(kv_tokens), kv_tokens)
        self.table = torch.full((rows + 1, max_len), kv_tokens, dtype=torch.int32)
        self.ids: dict[int, list[int]] = {}
        self.held: dict[int, int] = {}

    def add(self, ids: Sequence[int]) -> int:
        """A new sequence, none of it computed; its row."""
        row = self.random.choice([row for row in range(len(self.table) - 1) if row not in self.ids])
        self.ids[row] = list(ids)
        self.held[row] = 0
        return row

    def waiting(self, row: int) -> int:
        """Tokens that are known and not computed."""
        return len(self.ids[row]) - self.held[row]

    def step(self, query_lens: Mapping[int, int]) -> dict[int, torch.Tensor]:
        """Compute the next `query_lens[row]` tokens of each row; float32 [query_len, V], logits of all of them."""
        logits = self.decoder.forward(self._batch(query_lens), self.kv).clone()  # a decoder may use them again
        return dict(zip(query_lens, logits.split(list(query_lens.values())), strict=True))

    def _batch(self, query_lens: Mapping[int, int]) -> ForwardBatch:
        ids, positions = [], []
        for row, query_len in query_lens.items():
            held = self.held[row]
            span = range(held, held + query_len)
            self.table[row, held : held + query_len] = torch.tensor([self.free.pop() for _ in span])
            ids += self.ids[row][held : held + query_len]
            positions += [(row, position) for position in span]
            self.held[row] += query_len
        num_decodes = 0
        while list(query_lens.values())[num_decodes : num_decodes + 1] == [1]:
            num_decodes += 1
        return make_batch(
            ids, positions, self.table, [*query_lens], [*query_lens.values()], [self.held[row] for row in query_lens],
            num_decodes=num_decodes, wanted=list(range(len(ids) - num_decodes)),
        )  # fmt: skip


def make_batch(
    ids: Sequence[int], places: Sequence[tuple[int, int]], table: torch.Tensor, rows: list[int], query_lens: list[int],
    kv_lens: list[int], *, num_decodes: int = 0, wanted: Sequence[int] = (),
) -> ForwardBatch:  # fmt: skip
    """`places`: row and position of each token. `wanted`: which tokens after the decode rows are given logits."""
    return ForwardBatch(
        input_ids=torch.tensor(ids),
        token_rows=torch.tensor([row for row, _ in places]),
        positions=torch.tensor([position for _, position in places]),
        kv_index=torch.tensor([int(table[at]) for at in places]),
        kv_table=table,
        num_decodes=num_decodes,
        prompt_logits_index=torch.tensor(wanted, dtype=torch.int64) if len(rows) > num_decodes else None,
        chunks=torch.from_numpy(chunk_words(rows[num_decodes:], query_lens[num_decodes:], kv_lens[num_decodes:])),
        rows=rows,
        query_lens=query_lens,
        kv_lens=kv_lens,
    )


def logits_in_random_steps(
    decoder: Decoder, sequences: Sequence[Sequence[int]], *, seed: int = 0
) -> list[torch.Tensor]:
    """All logits of each sequence, float32 [n, V], from steps that mix chunks of random length with single tokens."""
    driver = ForwardDriver(decoder, rows=len(sequences), seed=seed)
    rows = [driver.add(ids) for ids in sequences]
    logits: dict[int, list[torch.Tensor]] = {row: [] for row in rows}
    while unfinished := [row for row in rows if driver.waiting(row)]:
        chosen = driver.random.sample(unfinished, driver.random.randint(1, len(unfinished)))
        query_lens = {row: min(driver.waiting(row), driver.random.choice([1, 1, 2, 7, 30])) for row in chosen}
        for row, rows_logits in driver.step(query_lens).items():
            logits[row].append(rows_logits)
    return [torch.cat(logits[row]) for row in rows]


def generate(decoder: Decoder, prompts: Sequence[Sequence[int]], *, num_tokens: int, chunk: int) -> list[list[int]]:
    """Greedy tokens of each prompt. Prompts start one step apart, so that chunks and single tokens share steps."""
    driver = ForwardDriver(decoder, rows=len(prompts))
    rows: list[int] = []
    while len(rows) < len(prompts) or any(driver.waiting(row) for row in rows):
        if len(rows) < len(prompts):
            rows.append(driver.add(prompts[len(rows)]))
        query_lens = {row: min(driver.waiting(row), chunk) for row in rows if driver.waiting(row)}
        for row, logits in driver.step(query_lens).items():
            wanted = len(prompts[rows.index(row)]) + num_tokens
            if driver.waiting(row) == 0 and len(driver.ids[row]) < wanted:
                driver.ids[row].append(int(logits[-1].argmax()))
        for row in rows:  # the last token is output only
            if len(driver.ids[row]) == len(prompts[rows.index(row)]) + num_tokens:
                driver.held[row] = len(driver.ids[row])
    return [driver.ids[row][len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
