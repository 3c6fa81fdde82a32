"""The test-only model against its definition in plain integers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_lib.checkpoint import HashConfig, open_checkpoint
from backend_lib.config import Settings
from backend_lib.models import load_decoder
from backend_lib.models.hash_model import HashModel, expected_next
from tests.support.checkpoints import hash_text, make_hash_checkpoint
from tests.support.forward import ForwardDriver, generate, logits_in_random_steps, make_batch

VOCAB = 1000
MODEL = HashModel(HashConfig(architecture="TandemHashModel", vocab_size=VOCAB, max_position=4096))
IDS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)


@settings(max_examples=50, deadline=None)
@given(sequences=st.lists(IDS, min_size=1, max_size=6), seed=st.integers(0, 1 << 20))
def test_every_token_follows_from_its_prefix_however_the_steps_are_cut(sequences: list[list[int]], seed: int) -> None:
    for ids, logits in zip(sequences, logits_in_random_steps(MODEL, sequences, seed=seed), strict=True):
        assert logits.argmax(1).tolist() == [expected_next(ids[: n + 1], VOCAB) for n in range(len(ids))]


def test_logits_are_ten_at_the_next_token_and_zero_elsewhere() -> None:
    (logits,) = logits_in_random_steps(MODEL, [[5, 6, 7]])
    assert logits.dtype == torch.float32
    assert logits.max(1).values.tolist() == [10.0] * 3
    assert logits.count_nonzero().item() == 3


def test_generation_from_a_checkpoint_folder_by_text(tmp_path) -> None:
    checkpoint = open_checkpoint(str(make_hash_checkpoint(tmp_path / "hash", vocab_size=300)))
    prompt = checkpoint.tokenizer.encode(hash_text([7, 9, 299])).ids
    assert prompt == [7, 9, 299]
    ids = list(prompt)
    for _ in range(20):
        ids.append(expected_next(ids, 300))
    assert generate(load_decoder(checkpoint, Settings()), [prompt], num_tokens=20, chunk=2) == [ids[3:]]


@pytest.mark.parametrize("spoil", ["pool", "table"])
def test_a_spoiled_cache_shows(spoil: str) -> None:
    driver = ForwardDriver(MODEL)
    row = driver.add([1, 2, 3, 4])
    driver.step({row: 3})
    if spoil == "pool":
        driver.kv[driver.table[row, 2].long()] += 1
    else:
        driver.table[row, 2] = driver.table[row, 1]
    assert driver.step({row: 1})[row].argmax().item() != expected_next([1, 2, 3, 4], VOCAB)


def test_a_step_without_logits() -> None:
    batch = make_batch([1, 2], [(0, 0), (0, 1)], torch.tensor([[0, 1]], dtype=torch.int32), [0], [2], [2])
    assert MODEL.forward(batch, MODEL.allocate_kv(2)).shape == (0, VOCAB)
