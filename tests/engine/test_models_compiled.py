"""Decoders with weights in codes against the eager decoder in float32 with the same weights, unpacked.

What is left between them is the rounding of activations to 8 bits, and of the KV cache to 16. So the reference comes in
two: as it is, which tells what the rounding costs, and with activations rounded by a plain formula, which is close.
"""

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from backend_lib.checkpoint import open_checkpoint
from backend_lib.config import Settings
from backend_lib.models import Decoder, load_decoder
from backend_lib.models.compiled import CompiledDecoder, can_compile, half_type
from backend_lib.models.decoder import Layer, TransformerDecoder
from backend_lib.models.eager import EagerStep
from backend_lib.models.linear import DenseLinear, Embedding, Fp16Linear
from backend_lib.models.load import build_decoder
from backend_lib.models.mlp import GatedMLP, MixtureOfExperts
from backend_lib.models.quantised import LOSSLESS, QuantisedEmbedding, QuantisedLinear
from backend_lib.models.threads import team
from kernels.cpu.attention import PAIRS
from kernels.cpu.matmul import GROUP
from tests.support.checkpoints import make_tiny_llama
from tests.support.families import VARIANTS, make_variant
from tests.support.forward import ForwardDriver, generate, logits_in_random_steps
from tests.support.gguf_families import convert
from tests.support.kernels import unpacked

# Sizes that fit the kernels; the factors of Phi-4's rotation are for heads of 20.
SIZES = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32, "moe_intermediate_size": 32}
PHI4_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.8, 2.0, 2.1, 2.2, 2.3, 2.4, 2.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0],
}  # fmt: skip
PHI4 = {"hidden_size": 192, "rope_parameters": PHI4_ROPE}  # transformers counts the factors by hidden / heads
WITH_EXPERTS = [variant for variant in VARIANTS if "moe" in variant or variant == "mixtral"]


pytestmark = pytest.mark.usefixtures("one_thread")


def make(path: Path, variant: str, **overrides) -> Path:
    sizes = SIZES | (PHI4 if variant.startswith("phi4") else {})
    return make_variant(path, variant, **(sizes | overrides))


def sequences(*lengths: int) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(2, 512, n).tolist() for n in lengths]


def load(path: Path, weights: str, dtype: str = "float32") -> Decoder:
    return load_decoder(open_checkpoint(str(path)), Settings(weights=weights, dtype=dtype))


def quantised(path: Path, weights: str) -> TransformerDecoder:
    """The decoder before it is compiled."""
    return build_decoder(open_checkpoint(str(path)), Settings(weights=weights))


class RoundedLinear(DenseLinear):
    """Activations are rounded to 127ths of the largest in each group of 32."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.reshape(len(x), -1, GROUP)
        largest = groups.abs().amax(-1, keepdim=True)
        rounded = (groups * (127 / largest.clamp(min=1e-30))).round() * (largest / 127)
        return super().__call__(rounded.reshape(x.shape))


class Reference:
    """The eager decoder with the weights that a quantised one stands for, multiplied by `kind`."""

    def __init__(self, kind: type[DenseLinear]) -> None:
        self.kind = kind

    def decoder(self, quantised: TransformerDecoder) -> TransformerDecoder:
        embedding = quantised.embedding
        if isinstance(embedding, QuantisedEmbedding):
            embedding = Embedding(self.linear(embedding.weight).weight)
        return TransformerDecoder(
            quantised.share, embedding=embedding, layers=[self.layer(layer) for layer in quantised.layers],
            norm=quantised.norm, head=self.linear(quantised.head), start_step=EagerStep,
        )  # fmt: skip

    def linear(self, linear: QuantisedLinear) -> DenseLinear:
        weight = torch.from_numpy(unpacked(linear.packed, linear.bits, linear.outputs, linear.groups))
        return self.kind(weight, torch.from_numpy(linear.bias[: linear.outputs].copy()))

    def layer(self, layer: Layer) -> Layer:
        old = layer.attention
        attention = dataclasses.replace(old, qkv=self.linear(old.qkv), output=self.linear(old.output))
        if isinstance(layer.mlp, MixtureOfExperts):
            mlp = dataclasses.replace(layer.mlp, experts=[self.mlp(each) for each in layer.mlp.experts])
        else:
            mlp = self.mlp(layer.mlp)
        return dataclasses.replace(layer, attention=attention, mlp=mlp)

    def mlp(self, mlp: GatedMLP) -> GatedMLP:
        return dataclasses.replace(mlp, gate_up=self.linear(mlp.gate_up), down=self.linear(mlp.down))


def difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> tuple[float, float]:
    """Relative to the spread of the logits around their mean, rms; and how often the best one is the same."""
    one, other = torch.cat(ours), torch.cat(theirs)
    spread = other - other.mean(-1, keepdim=True)
    agreed = (one.argmax(-1) == other.argmax(-1)).float().mean()
    return float((one - other).norm() / spread.norm()), float(agreed)


def token_errors(ours: list[torch.Tensor], theirs: list[torch.Tensor], start: int = 0) -> torch.Tensor:
    """Of each token from position `start` on, relative to the spread of its logits."""
    one, other = (torch.cat([each[start:] for each in logits]) for logits in (ours, theirs))
    return (one - other).norm(dim=-1) / (other - other.mean(-1, keepdim=True)).norm(dim=-1)


SEQUENCES = sequences(1, *[16] * 10, 60)
LATE = 10  # positions from here on are beyond the windows


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(variant: str, weights: str, tmp_path: Path) -> None:
    """Most tokens are as good as equal; the others have an activation that was half-way between two codes.

    Sums in another order tip it over, and it is a 254th of its group's largest off then, which these networks of random
    weights make more of. What rounding costs in all is 2 to 12 percent of the spread of logits here.
    """
    path = make(tmp_path, variant)
    original = quantised(path, weights)
    rounded = logits_in_random_steps(Reference(RoundedLinear).decoder(original), SEQUENCES)
    plain = logits_in_random_steps(Reference(DenseLinear).decoder(original), SEQUENCES)
    decoder = load(path, weights)
    assert isinstance(decoder, CompiledDecoder) == (variant not in WITH_EXPERTS)
    ours = logits_in_random_steps(decoder, SEQUENCES)
    assert float((token_errors(ours, rounded) < 1e-5).float().mean()) > 0.2
    assert float((token_errors(ours, rounded, LATE) < 1e-5).float().mean()) > 0.05
    assert difference(ours, rounded)[0] < 0.04
    for each in (ours, logits_in_random_steps(load(path, weights, "auto"), SEQUENCES)):
        rms, agreed = difference(each, plain)
        assert rms < 0.15 and agreed > 0.75


@pytest.mark.parametrize("dtype", ["float32", "auto"])
@pytest.mark.parametrize(
    "variant", ["llama", "gemma3", "qwen3, yarn, tied", "phi4-mini, long", "smollm3, window, untied"]
)
def test_logits_are_the_same_to_the_last_bit_in_other_steps(variant: str, dtype: str, tmp_path: Path) -> None:
    """Also when a step has more tokens than was reckoned with at first."""
    decoder = load(make(tmp_path, variant), "int4", dtype)
    path = open_checkpoint(str(tmp_path))
    small = load_decoder(path, Settings(weights="int4", dtype=dtype, prefill_chunk=2, max_running=2))
    first = logits_in_random_steps(decoder, SEQUENCES, seed=0)
    for other in (logits_in_random_steps(decoder, SEQUENCES, seed=1), logits_in_random_steps(small, SEQUENCES, seed=2)):
        assert all(torch.equal(*each) for each in zip(first, other, strict=True))


@pytest.mark.parametrize(("head_dim", "dtype"), [(32, "auto"), (48, "auto"), (32, "float32"), (16, "auto")])
def test_the_pool(head_dim: int, dtype: str, tmp_path: Path) -> None:
    """Two bytes a value with `auto`, unless pairs do not fill a head's vectors."""
    decoder = load(make_tiny_llama(tmp_path, head_dim=head_dim), "int8", dtype)
    pool = decoder.allocate_kv(9)
    half = torch.bfloat16 if PAIRS else torch.float16
    assert pool.dtype == (half if dtype == "auto" and (head_dim == 32 or not PAIRS) else torch.float32)
    assert pool.nbytes == 10 * decoder.kv_bytes_per_token


def test_other_sequences_entries_are_left_alone(tmp_path: Path) -> None:
    driver = ForwardDriver(load(make(tmp_path, "llama"), "int4"))
    first, second = driver.add([1, 2, 3]), driver.add([4, 5, 6])
    driver.step({first: 3})
    before = driver.kv.clone()
    driver.step({second: 3})
    index = driver.table[second, :3].long()
    assert not driver.kv[:, index].isnan().any()
    before[:, index] = driver.kv[:, index]
    assert torch.equal(before.nan_to_num(), driver.kv.nan_to_num())


def test_only_some_logits_are_wanted(tmp_path: Path) -> None:
    decoder = load(make(tmp_path, "gemma2"), "int8")
    whole, some = ForwardDriver(decoder), ForwardDriver(decoder)
    rows = [driver.add(SEQUENCES[1]) for driver in (whole, some)]
    expected = whole.step({rows[0]: 16})[rows[0]]
    batch = some._batch({rows[1]: 16})
    for wanted in ([15], [3, 0, 15], []):
        part = dataclasses.replace(batch, prompt_logits_index=torch.tensor(wanted, dtype=torch.int64))
        assert torch.equal(decoder.forward(part, some.kv), expected[wanted])


def test_a_step_can_be_run_again(tmp_path: Path) -> None:
    """What its words point at is kept until the next one."""
    decoder = load(make(tmp_path, "llama"), "int8")
    assert isinstance(decoder, CompiledDecoder)
    driver = ForwardDriver(decoder)
    rows = [driver.add(SEQUENCES[1]) for _ in range(3)]
    expected = torch.cat(list(driver.step(dict.fromkeys(rows, 5)).values()))
    rubbish = [torch.full((size,), 1 << 50) for size in range(1, 200)]  # where something has been freed
    team().run(decoder.operations, decoder.step)
    assert torch.equal(torch.from_numpy(decoder._buffers.logits)[: len(expected), : decoder.vocab_size], expected)
    del rubbish


def test_heads_that_the_kernels_cannot_attend_with_run_eagerly(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path, hidden_size=96, head_dim=24)
    original, decoder = quantised(path, "int8"), load(path, "int8")
    assert isinstance(decoder, TransformerDecoder) and isinstance(decoder.head, QuantisedLinear)
    ours = logits_in_random_steps(decoder, SEQUENCES)
    rounded = logits_in_random_steps(Reference(RoundedLinear).decoder(original), SEQUENCES)
    assert float((token_errors(ours, rounded, LATE) < 1e-5).float().mean()) > 0.05
    assert difference(ours, rounded)[0] < 0.04


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("sizes", [{"hidden_size": 80}, {"intermediate_size": 100}, {"head_dim": 20}])
def test_sizes_without_groups_are_named(weights: str, sizes: dict[str, int], tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path, **sizes)
    (inputs,) = sizes.values()
    inputs = 4 * inputs if "head_dim" in sizes else inputs
    message = rf"'weights' must be auto, fp16 or fp32 .* {inputs} inputs cannot be cut into groups of 32"
    with pytest.raises(ValueError, match=message):
        load(path, weights)


@pytest.mark.parametrize("sizes", [{"hidden_size": 80}, {"intermediate_size": 100}, {"head_dim": 20}])
def test_auto_keeps_layers_of_such_sizes_in_float16(sizes: dict[str, int], tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path, **sizes)
    decoder = load(path, "auto")
    assert isinstance(decoder, TransformerDecoder)
    layer = decoder.layers[0]
    linears = [decoder.head, layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down]
    kinds = [type(linear) for linear in linears]
    assert {Fp16Linear} < set(kinds) <= {Fp16Linear, QuantisedLinear}
    theirs = logits_in_random_steps(load(path, "fp32"), SEQUENCES)
    rms, agreed = difference(logits_in_random_steps(decoder, SEQUENCES), theirs)
    assert rms < 0.1 and agreed > 0.8


def test_a_cpu_without_the_instructions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = make(tmp_path, "llama")
    monkeypatch.setattr("kernels.cpu.isa.features", lambda: frozenset({"sse4.2", "avx"}))
    with pytest.raises(ValueError, match=r"'weights' is 'int4', which needs an x86-64 CPU with AVX2, FMA and F16C"):
        load(path, "int4")
    decoder = load(path, "auto")
    assert isinstance(decoder, TransformerDecoder) and isinstance(decoder.head, Fp16Linear)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_auto_finds_what_was_rounded_before(kind: str, tmp_path: Path) -> None:
    """4 bits lose nothing of what had 4; what had 8 stays in 8."""
    folder = make(tmp_path / "folder", "llama")
    file = convert(folder, tmp_path / "model.gguf", quantization=gguf.GGMLQuantizationType[kind])
    decoder = quantised(file, "auto")
    linears = [decoder.head, *(layer.attention.qkv for layer in decoder.layers), decoder.layers[0].mlp.down]
    assert {linear.bits for linear in linears} == {8 if kind == "Q8_0" else 4}
    assert all(linear.error < (1e-2 if kind == "Q8_0" else LOSSLESS) for linear in linears)


@pytest.fixture(scope="module")
def smollm2() -> TransformerDecoder:
    checkpoint = open_checkpoint("smollm2")
    return build_decoder(checkpoint, Settings(weights="auto", max_model_len=8192))


def test_smollm2_loses_nothing(smollm2: TransformerDecoder) -> None:
    layers = [
        linear
        for layer in smollm2.layers
        for linear in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
    ]
    assert len(layers) == 120
    assert {linear.bits for linear in layers} == {4}
    assert max(linear.error for linear in layers) < LOSSLESS
    assert smollm2.head.bits == 8 and smollm2.head.error < 0.01
    assert smollm2.embedding.weight is smollm2.head


def test_smollm2_says_what_it_should(smollm2: TransformerDecoder) -> None:
    assert can_compile(smollm2)
    tokenizer = open_checkpoint("smollm2").tokenizer
    prompt = tokenizer.encode("The capital of France is").ids
    decoder = CompiledDecoder(smollm2, 64, half_type(smollm2))
    (output,) = generate(decoder, [prompt], num_tokens=16, chunk=3)
    assert " Paris" in tokenizer.decode(output)


def test_smollm2_loses_what_rounding_loses(smollm2: TransformerDecoder) -> None:
    """Thirty layers make 5 to 7 percent of it, by either way to round; the best token is nearly always the same."""
    tokenizer = open_checkpoint("smollm2").tokenizer
    texts = [
        "The capital of France is Paris. It is the largest city in France, and",
        "Once upon a time, in a village by the sea, there lived an old fisherman who had never caught a fish.",
    ]
    ids = [tokenizer.encode(text).ids for text in texts]
    plain, rounded = (
        logits_in_random_steps(Reference(kind).decoder(smollm2), ids) for kind in (DenseLinear, RoundedLinear)
    )
    cost, _ = difference(rounded, plain)
    assert cost < 0.1
    for kv_type in (torch.float32, half_type(smollm2)):
        rms, agreed = difference(logits_in_random_steps(CompiledDecoder(smollm2, 64, kv_type), ids), plain)
        assert rms < 2 * cost and agreed > 0.9
