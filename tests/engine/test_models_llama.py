"""The decoder against transformers, on small random checkpoints."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from backend_lib.checkpoint import open_checkpoint
from backend_lib.config import Settings
from backend_lib.models import Decoder, load_decoder
from tests.support.checkpoints import LLAMA3_ROPE, make_config_folder, make_tiny_gguf, make_tiny_llama
from tests.support.forward import ForwardDriver, logits_in_random_steps, make_batch
from tests.support.gguf_families import permuted

VARIANTS = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "shards": {"shard_size": "60KB"},
    "llama3 rope": {"rope_parameters": LLAMA3_ROPE},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 48, "num_key_value_heads": 4},
    "one kv head": {"num_key_value_heads": 1, "num_hidden_layers": 3},
    "bfloat16": {"dtype": "bfloat16"},
}


@pytest.fixture(autouse=True)
def one_thread():
    """Threads gain nothing at this size, and collapse when another process wants the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def sequences() -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 512, n).tolist() for n in (1, 17, 100, 42)]


def load(path: Path, weights: str = "fp32") -> Decoder:
    return load_decoder(open_checkpoint(str(path)), Settings(weights=weights))


@torch.inference_mode()
def reference_logits(path: Path, sequences: list[list[int]]) -> list[torch.Tensor]:
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    return [model(torch.tensor([ids])).logits[0] for ids in sequences]


def largest_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    # In torch, because Python's max would pass over a NaN.
    return float((torch.cat(ours) - torch.cat(theirs)).abs().max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_in_mixed_steps(variant: str, tmp_path: Path, sequences) -> None:
    path = make_tiny_llama(tmp_path, **VARIANTS[variant])
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == (variant == "shards")
    ours = logits_in_random_steps(load(path), sequences)
    assert all(logits.dtype == torch.float32 for logits in ours)
    assert largest_difference(ours, reference_logits(path, sequences)) < 1e-4


@pytest.mark.parametrize("variant", ["tied", "biases"])
def test_fp16_weights_are_close(variant: str, tmp_path: Path, sequences) -> None:
    path = make_tiny_llama(tmp_path, **VARIANTS[variant])
    theirs = reference_logits(path, sequences)
    ours = logits_in_random_steps(load(path, "fp16"), sequences)
    spread = max(float(logits.abs().max()) for logits in theirs)
    assert largest_difference(ours, theirs) < 5e-3 * spread


def test_auto_keeps_weights_that_were_not_in_4_bits_as_int8(tmp_path: Path, sequences) -> None:
    path = make_tiny_llama(tmp_path)
    auto, int8 = (logits_in_random_steps(load(path, weights), sequences) for weights in ("auto", "int8"))
    assert largest_difference(auto, int8) == 0.0


def gguf_tensors(path: Path) -> dict[str, np.ndarray]:
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers.": "blk.",
    }  # fmt: skip
    heads = {"attn_q": 4, "attn_k": 2}
    tensors = {}
    for name, values in load_file(path / "model.safetensors").items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        kind = name.split(".")[-2]
        tensors[name] = permuted(values.numpy(), heads[kind]) if kind in heads else values.numpy()
    return tensors


@pytest.mark.parametrize("variant", ["untied", "tied", "biases"])
def test_gguf_gives_the_same_logits_as_the_folder(variant: str, tmp_path: Path, sequences) -> None:
    folder = make_tiny_llama(tmp_path / "folder", **VARIANTS[variant])
    file = make_tiny_gguf(tmp_path / "tiny.gguf", gguf_tensors(folder))
    ours, theirs = (logits_in_random_steps(load(path), sequences) for path in (file, folder))
    assert largest_difference(ours, theirs) == 0.0


def test_gguf_rotary_factors_are_llama3_scaling(tmp_path: Path, sequences) -> None:
    folder = make_tiny_llama(tmp_path / "folder", **VARIANTS["llama3 rope"])
    model = LlamaForCausalLM.from_pretrained(folder)
    plain = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    factors = {"rope_freqs.weight": (plain / model.model.rotary_emb.inv_freq).numpy()}
    file = make_tiny_gguf(tmp_path / "tiny.gguf", gguf_tensors(folder) | factors)
    ours = logits_in_random_steps(load(file), sequences)
    assert largest_difference(ours, reference_logits(folder, sequences)) < 1e-4


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
def test_gguf_quantisations_are_read(kind: str, tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "folder")
    file = make_tiny_gguf(tmp_path / "tiny.gguf", gguf_tensors(folder), quantization=gguf.GGMLQuantizationType[kind])
    ours, theirs = (logits_in_random_steps(load(path), [[1, 2, 3]])[0] for path in (file, folder))
    error = float((ours - theirs).norm() / theirs.norm())
    assert error < {"F16": 1e-3, "Q8_0": 3e-2, "Q4_0": 4e-1}[kind]


def test_a_step_without_logits(tmp_path: Path) -> None:
    for weights in ("fp32", "fp16"):
        decoder = load(make_tiny_llama(tmp_path), weights)
        batch = make_batch([1, 2], [(0, 0), (0, 1)], torch.tensor([[0, 1]], dtype=torch.int32), [0], [2], [2])
        assert decoder.forward(batch, decoder.allocate_kv(2)).shape == (0, 512)


def test_kv_bytes_are_what_the_pool_takes(tmp_path: Path) -> None:
    decoder = load(make_tiny_llama(tmp_path))
    pool = decoder.allocate_kv(9)
    assert sum(layer.nbytes for layer in pool) == 10 * decoder.kv_bytes_per_token


def test_other_sequences_entries_are_left_alone(tmp_path: Path) -> None:
    driver = ForwardDriver(load(make_tiny_llama(tmp_path)))
    first, second = driver.add([1, 2, 3]), driver.add([4, 5, 6])
    driver.step({first: 3})
    index = driver.table[first, :3].long()
    before = [layer[index].clone() for layer in driver.kv]
    driver.step({second: 3})
    assert all(torch.equal(layer[index], kept) for layer, kept in zip(driver.kv, before, strict=True))


class TestErrors:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return make_tiny_llama(tmp_path)

    def rewrite(self, folder: Path, change) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    def test_missing_tensor(self, folder: Path) -> None:
        self.rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
        with pytest.raises(ValueError, match=r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
            load(folder)

    def test_a_tensor_that_the_architecture_does_not_have(self, folder: Path) -> None:
        self.rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}))
        with pytest.raises(ValueError, match=r"has a tensor 'model\.layers\.0\.self_attn\.q_norm\.weight' \(1 such\)"):
            load(folder)
        self.rewrite(folder, lambda tensors: tensors.pop("model.layers.0.self_attn.q_norm.weight"))
        tensors = gguf_tensors(folder) | {"blk.0.attn_q_norm.weight": np.ones(16, dtype=np.float32)}
        with pytest.raises(ValueError, match=r"has a tensor 'blk\.0\.attn_q_norm\.weight' \(1 such\)"):
            load(make_tiny_gguf(folder / "tiny.gguf", tensors))

    def test_wrong_shape(self, folder: Path) -> None:
        self.rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
        with pytest.raises(ValueError, match=r"'model\.norm\.weight' has the shape \[63\].*\[64\]"):
            load(folder)

    def test_wrong_type(self, folder: Path) -> None:
        self.rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
        with pytest.raises(ValueError, match=r"'model\.norm\.weight' is torch\.int8"):
            load(folder)

    def test_truncated_file(self, folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
            load(folder)

    @pytest.mark.parametrize("start", [b"", b"\x00" * 4, b"\xff" * 8 + b"{}", (2).to_bytes(8, "little") + b"[]"])
    def test_garbled_header(self, folder: Path, start: bytes) -> None:
        (folder / "model.safetensors").write_bytes(start)
        with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
            load(folder)

    def test_header_that_lies_about_the_data(self, folder: Path) -> None:
        header = json.dumps({"a": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 8]}}).encode()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
        with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
            load(folder)

    def test_gguf_without_a_tensor(self, folder: Path) -> None:
        tensors = gguf_tensors(folder)
        del tensors["blk.1.attn_k.weight"]
        file = make_tiny_gguf(folder / "tiny.gguf", tensors)
        with pytest.raises(ValueError, match=r"no tensor 'blk\.1\.attn_k\.weight'"):
            load(file)

    def test_gguf_with_a_wrong_shape(self, folder: Path) -> None:
        file = make_tiny_gguf(folder / "tiny.gguf", gguf_tensors(folder), llama__feed_forward_length=128)
        with pytest.raises(ValueError, match=r"'blk\.0\.ffn_gate\.weight' has the shape \[96, 64\].*\[128, 64\]"):
            load(file)

    def test_rotary_factors_of_another_head_size(self, folder: Path) -> None:
        tensors = gguf_tensors(folder) | {"rope_freqs.weight": np.ones(5, dtype=np.float32)}
        with pytest.raises(ValueError, match="5 rotary factors for 8 frequencies"):
            load(make_tiny_gguf(folder / "tiny.gguf", tensors))

    def test_pickled_weights(self, tmp_path: Path) -> None:
        folder = make_config_folder(tmp_path / "pickled")
        (folder / "pytorch_model.bin").write_bytes(b"")
        with pytest.raises(ValueError, match=r"\.bin pickles"):
            load(folder)
