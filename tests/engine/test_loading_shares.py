"""What one of several ranks reads of a checkpoint, and what it makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from backend_lib.checkpoint import HashConfig, open_checkpoint
from backend_lib.config import Settings
from backend_lib.models import load as load_module
from backend_lib.models import load_decoder
from backend_lib.models.decoder import TransformerDecoder
from backend_lib.models.hash_model import HashModel
from backend_lib.models.load import build_decoder
from backend_lib.models.quantised import QuantisedLinear
from backend_lib.models.weights import open_tensors
from tests.support.checkpoints import make_tiny_llama
from tests.support.families import make_variant
from tests.support.forward import make_batch
from tests.support.gguf_families import convert
from tests.support.kernels import unpacked

HIDDEN, HEAD_DIM, INNER, VOCAB = 256, 64, 512, 512
SIZES = {
    "hidden_size": HIDDEN, "head_dim": HEAD_DIM, "intermediate_size": INNER, "num_attention_heads": 8,
    "num_key_value_heads": 4, "num_hidden_layers": 2,
}  # fmt: skip


class Seat(NamedTuple):
    """A rank that computes nothing."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> None:
        raise AssertionError("loading adds nothing up")

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        raise AssertionError("loading gathers nothing")


def share(path: Path, seat: Seat, weights: str) -> TransformerDecoder:
    return build_decoder(open_checkpoint(str(path)), Settings(weights=weights), ranks=seat)


def whole(path: Path, weights: str) -> TransformerDecoder:
    return build_decoder(open_checkpoint(str(path)), Settings(weights=weights))


def bytes_read(path: Path, seat: Seat, monkeypatch: pytest.MonkeyPatch) -> int:
    opened: list[Any] = []

    def open_and_keep(*args: Any) -> Any:
        opened.append(open_tensors(*args))
        return opened[0]

    with monkeypatch.context() as patch:
        patch.setattr(load_module, "open_tensors", open_and_keep)
        share(path, seat, "fp32")
    return opened[0].progress.done_bytes


def layer_weights(heads: int, kv_heads: int, inner: int) -> int:
    return HIDDEN * (HEAD_DIM * (2 * heads + 2 * kv_heads) + 3 * inner)


# Of a rank: query heads, key-value heads, inner size, rows of the vocabulary.
SHARES = {
    2: [(4, 2, 256, 256), (4, 2, 256, 256)],
    3: [(4, 2, 192, 171), (2, 1, 160, 171), (2, 1, 160, 170)],
    8: [(1, 1, 64, 64)] * 8,
}
NORMS = 5 * HIDDEN * 4


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("float32", 3),
        ("Q8_0", 8),
        *(
            pytest.param(kind, size, marks=pytest.mark.long)
            for kind in ("float32", "bfloat16", "F32", "F16", "BF16", "Q8_0")
            for size in SHARES
        ),
    ],
)
def test_a_rank_reads_its_share_and_no_more(
    kind: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 32 values are cut between, so a rank reads no value that it does not keep."""
    is_folder = kind in ("float32", "bfloat16")
    path = make_tiny_llama(tmp_path / "model", dtype=kind if is_folder else "float32", shard_size="1MB", **SIZES)
    if not is_folder:
        path = make_tiny_llama(tmp_path / "one", **SIZES)
        path = convert(path, tmp_path / "model.gguf", quantization=gguf.GGMLQuantizationType[kind])
    bits = {"float32": 32, "F32": 32, "Q8_0": 34 * 8 / 32}.get(kind, 16)
    norms = NORMS // 2 if kind == "bfloat16" else NORMS
    for rank, (heads, kv_heads, inner, rows) in enumerate(SHARES[size]):
        matrices = 2 * layer_weights(heads, kv_heads, inner) + 2 * rows * HIDDEN
        assert bytes_read(path, Seat(rank, size), monkeypatch) == matrices * bits / 8 + norms


def test_a_cut_through_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of TQ1_0 have 256 values in 54 bytes. Of rows of 512, every rank reads the block in which it has 64."""
    folder = make_tiny_llama(tmp_path / "folder", **SIZES)
    path = convert(folder, tmp_path / "model.gguf", quantization=gguf.GGMLQuantizationType.TQ1_0)
    heads, kv_heads, inner, rows = SHARES[8][0]
    layer = HIDDEN * (HEAD_DIM * (heads + 2 * kv_heads) + 2 * inner) + 2 * HIDDEN * 256
    expected = (2 * layer + 2 * rows * HIDDEN) * 54 / 256 + NORMS
    assert [bytes_read(path, Seat(rank, 8), monkeypatch) for rank in range(8)] == [expected] * 8


def linears(decoder: TransformerDecoder) -> dict[str, Any]:
    found = {"head": decoder.head}
    for place, layer in enumerate(decoder.layers):
        found |= {f"{place}.qkv": layer.attention.qkv, f"{place}.output": layer.attention.output}
        found |= {f"{place}.gate_up": layer.mlp.gate_up, f"{place}.down": layer.mlp.down}
    return found


def weight_of(linear: Any) -> torch.Tensor:
    if not isinstance(linear, QuantisedLinear):
        return linear.weight
    return torch.from_numpy(unpacked(linear.packed, linear.bits, linear.outputs, linear.groups))


def cut(
    weight: torch.Tensor, name: str, heads: range, kv_heads: range, inner: range, vocabulary: range
) -> torch.Tensor:
    """The share of one of the whole decoder's matrices."""
    kind = name.split(".")[-1]
    if kind == "head":
        return weight[vocabulary.start : vocabulary.stop]
    if kind == "output":
        return weight.unflatten(1, (-1, HEAD_DIM))[:, heads.start : heads.stop].flatten(1)
    if kind == "down":
        return weight[:, inner.start : inner.stop]
    if kind == "gate_up":
        return torch.cat([each[inner.start : inner.stop] for each in weight.chunk(2)])
    parts = zip(weight.unflatten(0, (-1, HEAD_DIM)).split([8, 4, 4]), (heads, kv_heads, kv_heads), strict=True)
    return torch.cat([part[each.start : each.stop].flatten(0, 1) for part, each in parts])


SOURCES = ["folder", "gguf", "fused", "Q4_0", "TQ1_0"]
RANKS = {
    2: [(range(4), range(2), range(256), range(256)), (range(4, 8), range(2, 4), range(256, 512), range(256, 512))],
    3: [
        (range(4), range(2), range(192), range(171)),
        (range(4, 6), range(2, 3), range(192, 352), range(171, 342)),
        (range(6, 8), range(3, 4), range(352, 512), range(342, 512)),
    ],
}


@pytest.mark.parametrize(
    ("weights", "source", "size"),
    [
        *(("int8", source, 3) for source in SOURCES),
        *(
            pytest.param(weights, source, size, marks=pytest.mark.long)
            for weights in ("fp32", "int8", "int4")
            for source in SOURCES
            for size in RANKS
        ),
    ],
)
def test_shares_are_cut_from_the_whole(weights: str, source: str, size: int, tmp_path: Path) -> None:
    """Codes too: groups are not cut. A GGUF's queries and keys are in another order, by heads."""
    path = make_variant(tmp_path / "model", "phi3" if source == "fused" else "llama", **SIZES)
    if source in ("gguf", "Q4_0", "TQ1_0"):
        kind = gguf.GGMLQuantizationType["F32" if source == "gguf" else source]
        path = convert(path, tmp_path / "model.gguf", quantization=kind)
    original = linears(whole(path, weights))
    for rank, ranges in enumerate(RANKS[size]):
        for name, linear in linears(share(path, Seat(rank, size), weights)).items():
            expected = cut(weight_of(original[name]), name, *ranges)
            ours = weight_of(linear)
            assert torch.equal(ours[: len(expected)], expected), (rank, name)
            assert (
                len(ours) == (-(-VOCAB // size) if name == "head" else len(expected))
                and not ours[len(expected) :].any()
            )


def test_a_bias_of_a_sum_is_rank_0s(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path, attention_bias=True, mlp_bias=True, **SIZES)
    expected = linears(whole(path, "fp32"))
    for rank in range(2):
        ours = linears(share(path, Seat(rank, 2), "fp32"))
        for name in ("0.output", "1.down"):
            assert ours[name].bias is None if rank else torch.equal(ours[name].bias, expected[name].bias)
        inner = slice(rank * 256, (rank + 1) * 256)
        gate, up = expected["0.gate_up"].bias.chunk(2)
        assert torch.equal(ours["0.gate_up"].bias, torch.cat([gate[inner], up[inner]]))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("layers.1.mlp.down_proj.weight", lambda old: None, r"has no tensor 'model.layers.1.mlp.down_proj.weight'"),
        ("layers.1.mlp.down_proj.bias", lambda old: None, r"has no tensor 'model.layers.1.mlp.down_proj.bias'"),
        ("layers.1.mlp.down_proj.bias", lambda old: old[:9], r"down_proj.bias' has the shape \[9\]; .* \[256\]"),
        (
            "layers.0.self_attn.o_proj.weight", lambda old: old[:, :256],
            r"o_proj.weight' has the shape \[256, 256\]; .* asks for \[256, 512\]",
        ),
        ("layers.0.mlp.gate_proj.scale", lambda old: torch.ones(4), r"has a tensor 'model.layers.0.mlp.gate_proj.sc"),
    ],
)  # fmt: skip
def test_every_rank_refuses_a_wrong_checkpoint(name: str, change: Any, message: str, rank: int, tmp_path: Path) -> None:
    """Also for what it would not read."""
    path = make_tiny_llama(tmp_path, attention_bias=True, mlp_bias=True, **SIZES)
    tensors = load_file(path / "model.safetensors")
    changed = change(tensors.pop(f"model.{name}", None))
    tensors |= {} if changed is None else {f"model.{name}": changed.contiguous()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        share(path, Seat(rank, 2), "fp32")


def test_more_ranks_than_heads_are_refused(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path, **SIZES)
    with pytest.raises(ValueError, match=r"'tensor_parallel' is 9; allowed .* is at most 8: it has 8 query heads"):
        load_decoder(open_checkpoint(str(path)), Settings(weights="fp32"), ranks=Seat(8, 9))


@pytest.mark.parametrize("weights", ["int8", "int4", "auto"])
def test_heads_that_fill_no_groups_of_codes(weights: str, tmp_path: Path) -> None:
    """`auto` keeps such a layer in float16. Then no rank's decoder is a program: they must add up the same things."""
    heads = {"head_dim": 48, "num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 192}
    path = make_tiny_llama(tmp_path, **(SIZES | heads))
    if weights == "auto":
        kinds = {type(load_decoder(open_checkpoint(str(path)), Settings(), ranks=Seat(rank, 4))) for rank in range(4)}
        assert kinds == {TransformerDecoder}
        outputs = [linears(share(path, Seat(rank, 4), "auto"))["0.output"] for rank in range(4)]
        assert [type(output).__name__ for output in outputs] == ["QuantisedLinear"] * 2 + ["Fp16Linear"] * 2
    else:
        with pytest.raises(ValueError, match=rf"'tensor_parallel' is 4; with 'weights' {weights} .* are 1, 3: "):
            share(path, Seat(3, 4), weights)


@pytest.mark.parametrize(("size", "kv_heads"), [(2, 2), (3, 1), (8, 1)])
@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_a_rank_keeps_its_own_key_value_heads(weights: str, size: int, kv_heads: int, tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path, **SIZES)
    settings = Settings(weights=weights, dtype="float32")
    decoder = load_decoder(open_checkpoint(str(path)), settings, ranks=Seat(size - 1, size))
    assert decoder.kv_bytes_per_token == 2 * 2 * kv_heads * HEAD_DIM * 4
    pools = decoder.allocate_kv(9)
    held = pools.nbytes if isinstance(pools, torch.Tensor) else sum(pool.nbytes for pool in pools)
    assert held == 10 * decoder.kv_bytes_per_token


def test_the_hash_model_gives_logits_on_rank_0() -> None:
    config = HashConfig(architecture="TandemHashModel", vocab_size=100, max_position=64)
    pools = []
    for rank in range(2):
        model = HashModel(config, Seat(rank, 2))
        pools.append(model.allocate_kv(4))
        table = torch.arange(4, dtype=torch.int32)[None]
        batch = make_batch([7, 8, 9], [(0, 0), (0, 1), (0, 2)], table, [0], [3], [3], wanted=[2])
        assert model.forward(batch, pools[-1]).shape == ((1, 0) if rank else (1, 100))
    assert torch.equal(*pools) and pools[0][:3].all()
