"""Decoders divided among ranks, which are processes that add up over Gloo, against the same decoder whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backend_lib.checkpoint import open_checkpoint
from backend_lib.config import Settings
from backend_lib.models import load_decoder
from backend_lib.models.load import build_decoder
from tests.support.families import VARIANTS, make_variant
from tests.support.forward import generate, logits_in_random_steps
from tests.support.ranks import RankPool, logits_of_some, ranks_sum, shared_generation, shared_logits

# Three key-value heads, five groups of codes, and a vocabulary that are not divisible by 2 or 4.
UNEVEN = {
    "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 54, "intermediate_size": 77, "vocab_size": 515,
}  # fmt: skip
GROUPED = {"hidden_size": 288, "intermediate_size": 160, "head_dim": 32, "moe_intermediate_size": 160}
# The factors of Phi-4's rotation are for heads of 20.
WITH_CODES = [variant for variant in VARIANTS if not variant.startswith("phi4")]
HAS_EXPERTS = [variant for variant in VARIANTS if "moe" in variant or variant == "mixtral"]
NUM_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4,",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time, in a village by the sea, there lived an old fisherman who had never caught a fish. Every day",
]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(2, tmp_path_factory.mktemp("two"))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(4, tmp_path_factory.mktemp("four"))
    yield pool
    pool.close()


def sequences(*lengths: int) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(2, 512, n).tolist() for n in lengths]


SEQUENCES = sequences(1, 16, 16, 60)


def check_fp32(pool: RankPool, path: Path) -> None:
    decoder = load_decoder(open_checkpoint(str(path)), Settings(weights="fp32"))
    theirs = torch.cat(logits_in_random_steps(decoder, SEQUENCES))
    assert float(theirs.std()) > 0.3
    for _, ours in pool.call(shared_logits, str(path), {"weights": "fp32"}, SEQUENCES):
        assert float((torch.from_numpy(ours) - theirs).abs().max()) < 1e-4


def check_codes(pool: RankPool, path: Path, weights: str, kind: str) -> None:
    """Sums in another order tip an activation over that was half-way between two codes, which these networks of random
    weights make more of. Some tokens have none such."""
    settings: dict[str, Any] = {"weights": weights, "dtype": "float32"}
    decoder = load_decoder(open_checkpoint(str(path)), Settings(**settings))
    assert type(decoder).__name__ == kind
    theirs = torch.cat(logits_in_random_steps(decoder, SEQUENCES))
    spread = theirs - theirs.mean(-1, keepdim=True)
    for ours_kind, ours in pool.call(shared_logits, str(path), settings, SEQUENCES):
        assert ours_kind == kind
        wrong = torch.from_numpy(ours) - theirs
        assert float(wrong.norm() / spread.norm()) < 0.04
        assert float((wrong.norm(dim=-1) / spread.norm(dim=-1) < 1e-5).float().mean()) > 0.2


def kind_of(variant: str) -> str:
    return "TransformerDecoder" if variant in HAS_EXPERTS else "CompiledDecoder"


def test_logits_of_fused_projections_in_uneven_shares(two: RankPool, tmp_path: Path) -> None:
    check_fp32(two, make_variant(tmp_path, "phi3", **UNEVEN))


@pytest.mark.parametrize("variant", ["llama", "gemma2"])
def test_logits_of_a_program_in_uneven_shares(variant: str, two: RankPool, tmp_path: Path) -> None:
    """Gemma has norms after each sum, one matrix for embedding and head, scaled embeddings, and a cap of the logits."""
    path = make_variant(tmp_path, variant, **(UNEVEN | GROUPED))
    check_codes(two, path, "int8", "CompiledDecoder")


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_every_family(variant: str, size: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Two key-value heads: four ranks share them."""
    pool = request.getfixturevalue({2: "two", 4: "four"}[size])
    check_fp32(pool, make_variant(tmp_path / "even", variant))
    if not variant.startswith("phi4"):  # transformers counts its factors by hidden / heads
        check_fp32(pool, make_variant(tmp_path / "uneven", variant, moe_intermediate_size=29, **UNEVEN))


@pytest.mark.long
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("variant", WITH_CODES)
def test_logits_of_every_family_in_codes(
    variant: str, size: int, weights: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pool = request.getfixturevalue({2: "two", 4: "four"}[size])
    check_codes(pool, make_variant(tmp_path / "even", variant, **GROUPED), weights, kind_of(variant))
    check_codes(pool, make_variant(tmp_path / "uneven", variant, **(UNEVEN | GROUPED)), weights, kind_of(variant))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_logits_are_the_same_to_the_last_bit_in_other_steps(
    size: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Sums are in one order, however many tokens are in a step."""
    pool = request.getfixturevalue({2: "two", 4: "four"}[size])
    path = make_variant(tmp_path, "llama", **(UNEVEN | GROUPED))
    args = str(path), {"weights": "int8", "dtype": "float32"}, SEQUENCES
    (_, first), *_ = pool.call(shared_logits, *args, 0)
    for seed in (1, 2):
        (_, other), *_ = pool.call(shared_logits, *args, seed)
        assert np.array_equal(first, other)


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_only_some_logits_are_wanted(weights: str, two: RankPool, tmp_path: Path) -> None:
    """Or none: a chunk of a prompt that goes on in the next step."""
    args = str(make_variant(tmp_path, "gemma2", **(UNEVEN | GROUPED))), {"weights": weights, "dtype": "float32"}
    whole, *some = [list(range(16)), [15], [3, 0, 15], []]
    for expected, *parts in two.call(logits_of_some, *args, SEQUENCES[1], [whole, *some]):
        for places, part in zip(some, parts, strict=True):
            assert part.shape == (len(places), 515)
            assert np.allclose(part, expected[places], atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("shape", [(1, 4), (3, 5), (1, 1), (64, 577)])
def test_a_sum_in_the_order_of_the_ranks(shape: tuple[int, int], four: RankPool) -> None:
    terms = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0))
    expected = ((terms[0] + terms[1]) + terms[2]) + terms[3]
    for total in four.call(ranks_sum, terms.numpy()):
        assert np.array_equal(total, expected.numpy())


def check_kernels(pool: RankPool, path: Path) -> None:
    ids = sequences(1, 12, 15)
    decoder = build_decoder(open_checkpoint(str(path)), Settings(weights="fp32", device="cpu"))
    theirs = torch.cat(logits_in_random_steps(decoder, ids))
    for kind, ours in pool.call(shared_logits, str(path), {"device": "interpret"}, ids):
        assert kind == "GraphedDecoder"
        assert float((torch.from_numpy(ours) - theirs).abs().max()) < 1e-4


def test_logits_by_kernels(two: RankPool, tmp_path: Path) -> None:
    """Head norms too, a row of which belongs to a head."""
    check_kernels(two, make_variant(tmp_path, "qwen3", **UNEVEN, num_hidden_layers=2))


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("variant", ["gemma2", "phi3", "qwen3 moe, some layers dense", "mixtral"])
def test_logits_of_some_families_by_kernels(
    variant: str, size: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    check_kernels(request.getfixturevalue({2: "two", 4: "four"}[size]), make_variant(tmp_path, variant))


@pytest.mark.long
@pytest.mark.parametrize("weights", ["auto", "fp32"])
@pytest.mark.parametrize("size", [2, 4])
def test_smollm2_says_the_same(weights: str, size: int, request: pytest.FixtureRequest) -> None:
    """Or a token as good: the margin is by how much the whole decoder's best logit exceeds that of the token said.

    With codes a sum in another order tips activations over, so that logits differ by what rounding costs.
    """
    pool = request.getfixturevalue({2: "two", 4: "four"}[size])
    checkpoint = open_checkpoint("smollm2")
    settings: dict[str, Any] = {"weights": weights, "max_model_len": 512}
    decoder = load_decoder(checkpoint, Settings(**settings))
    prompts = [checkpoint.tokenizer.encode(prompt).ids for prompt in PROMPTS]
    expected = generate(decoder, prompts, num_tokens=NUM_TOKENS, chunk=3)
    outputs, *others = pool.call(shared_generation, "smollm2", settings, prompts, NUM_TOKENS)
    assert all(other == outputs for other in others)
    lost = [margin_lost(decoder, *each) for each in zip(prompts, outputs, strict=True)]
    for text, output, other, margin in zip(PROMPTS, outputs, expected, lost, strict=True):
        first = next((place for place, pair in enumerate(zip(output, other, strict=True)) if len(set(pair)) > 1), None)
        print(f"{size} ranks, {weights}, {text!r}: first difference {first}, largest margin lost {margin:.4f}")
    assert max(lost) < {"auto": 0.5, "fp32": 1e-3}[weights]


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
def test_smollm2_loses_nothing_by_division(size: int, request: pytest.FixtureRequest) -> None:
    """Codes are as far from float32 as those of the whole decoder."""
    pool = request.getfixturevalue({2: "two", 4: "four"}[size])
    checkpoint = open_checkpoint("smollm2")
    ids = [checkpoint.tokenizer.encode(prompt).ids for prompt in PROMPTS]
    plain, whole = (
        torch.cat(logits_in_random_steps(load_decoder(checkpoint, Settings(weights=weights)), ids))
        for weights in ("fp32", "auto")
    )
    (kind, logits), *_ = pool.call(shared_logits, "smollm2", {"weights": "auto"}, ids)
    assert kind == "CompiledDecoder"
    spread = (plain - plain.mean(-1, keepdim=True)).norm()
    lost, lost_by_whole = (float((each - plain).norm() / spread) for each in (torch.from_numpy(logits), whole))
    print(f"{size} ranks: {lost:.4f} of the logits' spread is lost, whole {lost_by_whole:.4f}")
    assert lost < 1.2 * lost_by_whole


def margin_lost(decoder: Any, prompt: list[int], output: list[int]) -> float:
    """At the worst of the tokens. 0 if the whole decoder says the same after the same beginning."""
    (logits,) = logits_in_random_steps(decoder, [prompt + output])
    after = logits[len(prompt) - 1 : -1]
    return float((after.max(1).values - after.gather(1, torch.tensor(output)[:, None])[:, 0]).max())
