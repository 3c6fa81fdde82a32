"""Hugging Face folders: what is read from them, and what is said of those that cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest

from backend_lib.checkpoint import (
    Checkpoint,
    HashConfig,
    LayerConfig,
    RopeConfig,
    RopeScaling,
    SamplingDefaults,
    open_checkpoint,
)
from tests.support.checkpoints import LLAMA3_ROPE, hash_text, make_config_folder, make_hash_checkpoint, tiny_tokenizer


def make_folder(path: Path, **overrides: Any) -> Path:
    folder = make_config_folder(path / "tiny", **overrides)
    (folder / "model.safetensors").write_bytes(b"")  # opening a checkpoint looks for the weights, not into them
    return folder


def open_folder(path: Path, **overrides: Any) -> Checkpoint:
    return open_checkpoint(str(make_folder(path, **overrides)))


def write_json(folder: Path, name: str, **values: Any) -> None:
    (folder / name).write_text(json.dumps(values))


def test_a_plain_folder(tmp_path: Path) -> None:
    checkpoint = open_folder(tmp_path)
    config = checkpoint.config
    assert checkpoint.name == "tiny"
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (64, 4, 2, 16)
    assert (config.layers, config.rms_norm_eps) == ((LayerConfig(rope=RopeConfig(dim=16, theta=10000.0)),) * 2, 1e-6)
    assert (checkpoint.context_length, checkpoint.eos_token_ids) == (512, (1,))
    assert (checkpoint.bos_token, checkpoint.eos_token) == ("<s>", "</s>")
    assert checkpoint.chat_template.startswith("{% for message")
    assert [path.name for path in checkpoint.weights.safetensors] == ["model.safetensors"]


def test_fields_that_may_be_left_out_or_null(tmp_path: Path) -> None:
    config = open_folder(tmp_path, num_key_value_heads=None, head_dim=None, rope_scaling=None).config
    assert (config.num_kv_heads, config.head_dim) == (4, 16)


@pytest.mark.parametrize("add_bos", [False, True])
def test_the_tokenizer_adds_what_its_file_says(add_bos: bool, tmp_path: Path) -> None:
    tokenizer = open_folder(tmp_path, add_bos=add_bos).tokenizer
    assert (tokenizer.encode("hello").ids[0] == 0) == add_bos
    assert tokenizer.decode(tokenizer.encode("hello wörld 🎉").ids) == "hello wörld 🎉"


def test_truncation_and_padding_in_the_file_are_not_obeyed(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=100)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert len(open_checkpoint(str(folder)).tokenizer.encode("zzzzzzzz").ids) == 8


def test_generation_config_has_the_last_word_on_eos(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    write_json(folder, "generation_config.json", eos_token_id=[7, 8, 7])
    assert open_checkpoint(str(folder)).eos_token_ids == (7, 8)
    write_json(folder, "generation_config.json", temperature=0.6)
    assert open_checkpoint(str(folder)).eos_token_ids == (1,)


def test_generation_config_says_how_to_sample(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    assert open_checkpoint(str(folder)).sampling == SamplingDefaults()
    write_json(
        folder, "generation_config.json", do_sample=False, temperature=0.6, top_k=20, top_p=None, max_new_tokens=99
    )
    assert open_checkpoint(str(folder)).sampling == SamplingDefaults(temperature=0.6, top_k=20, max_tokens=99)


@pytest.mark.parametrize(("key", "value"), [("temperature", "hot"), ("top_k", [1]), ("max_new_tokens", 0)])
def test_a_generation_config_without_sense_is_named(key: str, value: Any, tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    write_json(folder, "generation_config.json", **{key: value})
    with pytest.raises(ValueError, match=rf"generation_config\.json: '{key}' is"):
        open_checkpoint(str(folder))


def test_no_eos_at_all(tmp_path: Path) -> None:
    assert open_folder(tmp_path, eos_token_id=None).eos_token_ids == ()


def test_chat_templates(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)

    def templates() -> tuple[str | None, str | None]:
        checkpoint = open_checkpoint(str(folder))
        return checkpoint.chat_template, checkpoint.tool_template

    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}, {"name": "rag"}]
    write_json(folder, "tokenizer_config.json", chat_template=named)
    write_json(folder, "chat_template.json", chat_template="P")
    assert templates() == ("D", "T")
    (folder / "chat_template.jinja").write_text("J")
    assert templates() == ("J", None)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("JT")
    assert templates() == ("J", "JT")
    (folder / "chat_template.jinja").unlink()
    (folder / "additional_chat_templates" / "tool_use.jinja").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert templates() == ("P", None)
    write_json(folder, "chat_template.json", chat_template={"default": "P", "tool_use": "PT"})
    assert templates() == ("P", "PT")
    (folder / "chat_template.json").unlink()
    assert templates() == (None, None)


@pytest.mark.parametrize(
    "template",
    [
        5,
        {},
        [],
        ["D"],
        [{"name": ["default"]}],
        [{"name": "tool_use", "template": "T"}],
        {"default": 5},
        {"default": "D", "tool_use": 5},
    ],
)
def test_a_chat_template_that_is_none(template: Any, tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    write_json(folder, "tokenizer_config.json", chat_template=template)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: 'chat_template' is .*; supported is a string"):
        open_checkpoint(str(folder))


LLAMA3 = RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64)


@pytest.mark.parametrize(
    ("fields", "theta", "scaling"),
    [
        ({"rope_theta": 500.0}, 500.0, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}, 300.0, None),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE | {"rope_theta": None}}, 5e5, LLAMA3),
        ({"rope_parameters": LLAMA3_ROPE}, 10000.0, LLAMA3),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 10000.0, RopeScaling(kind="linear", factor=2.0)),
    ],
)
def test_rotary_positions_as_old_and_new_versions_write_them(fields, theta, scaling, tmp_path: Path) -> None:
    config = open_folder(tmp_path, **fields).config
    assert config.layers[0].rope == RopeConfig(dim=16, theta=theta, scaling=scaling)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, r"'architectures' is \['MambaForCausalLM'\]; supported is .*Llama"),
        ({"architectures": None}, "'architectures' is missing"),
        ({"architectures": []}, r"'architectures' is \[\]"),
        ({"architectures": "LlamaForCausalLM"}, "'architectures' is 'LlamaForCausalLM'"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "64"}, "'hidden_size' is '64'; supported is a whole number of at least 1"),
        ({"hidden_size": True}, "'hidden_size' is True"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
        ({"num_attention_heads": 0}, "'num_attention_heads' is 0"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
        ({"head_dim": 15}, "15 of head_dim 15 would be rotated"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'; supported is 'silu'"),
        ({"tie_word_embeddings": "no"}, "'tie_word_embeddings' is 'no'; supported is true or false"),
        ({"rope_scaling": {"type": "ntk", "factor": 2}}, "'type' is 'ntk'; supported is .*'llama3'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "'low_freq_factor' is missing"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "'factor' is -1"),
        ({"rope_scaling": "linear"}, "'rope_scaling' is 'linear'; supported is an object"),
        ({"partial_rotary_factor": 1.5}, "24 of head_dim 16 would be rotated"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by 'gptq'"),
        ({"eos_token_id": 512}, "'eos_token_id' is 512; supported is token ids below the vocabulary's 512"),
        ({"eos_token_id": "</s>"}, "'eos_token_id' is '</s>'"),
    ],
)
def test_what_is_not_supported_is_named(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as error:
        open_folder(tmp_path, **fields)
    assert "config.json" in str(error.value)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("Mistral", {"attention_bias": True}, "'attention_bias' is True; supported is false"),
        ("Mistral", {"sliding_window": 0}, "'sliding_window' is 0; supported is a whole number of at least 1"),
        ("Mistral", {"hidden_act": "relu2"}, "'hidden_act' is 'relu2'; supported is 'silu', 'gelu_pytorch_tanh'"),
        ("Phi3", {"mlp_bias": True}, "'mlp_bias' is True"),
        ("Phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1]}}, "'long_factor' is missing"),
        ("Phi3", {"rope_scaling": {"type": "su", "long_factor": ["a"]}}, "'short_factor' is missing"),
        ("Qwen2", {"layer_types": ["full_attention"]}, r"'layer_types' is \['full_attention'\]; .*a list of 2"),
        ("Qwen2", {"layer_types": ["linear_attention"] * 2}, "'layer_types' is .*'sliding_attention'"),
        ("Qwen3", {"rope_scaling": {"rope_type": "yarn"}}, "'factor' is missing"),
        ("Qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 2, "mscale": 1.0}}, "'mscale' is 1.0"),
        ("Qwen3Moe", {"mlp_only_layers": [-1]}, r"'mlp_only_layers' is \[-1\]"),
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 5}, "5 experts per token are asked for, of 4"),
        ("SmolLM3", {"no_rope_layers": [1]}, r"'no_rope_layers' is \[1\]; supported is a list of 2"),
        ("Gemma2", {"use_bidirectional_attention": True}, "'use_bidirectional_attention' is True"),
        ("Gemma3", {"hidden_activation": "gelu"}, "'hidden_activation' is 'gelu'; supported is .*'gelu_pytorch_tanh'"),
        ("Gemma3", {"head_dim": 15}, "15 of head_dim 15 would be rotated"),
    ],
)
def test_what_a_family_does_not_support_is_named(
    family: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        open_folder(tmp_path, architectures=[f"{family}ForCausalLM"], **fields)
    assert "config.json" in str(error.value)


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_names_that_longrope_had(kind: str, tmp_path: Path) -> None:
    rope = {"type": kind, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    fields = {"rope_scaling": rope, "original_max_position_embeddings": 64}
    config = open_folder(tmp_path, architectures=["Phi3ForCausalLM"], **fields).config
    scaling = config.layers[0].rope.scaling
    assert (scaling.kind, scaling.original_max_position, config.max_position) == ("longrope", 64, 512)
    assert scaling.attention_factor == pytest.approx((1 + 3 / 6) ** 0.5)  # log2 of 512 / 64, over that of 64


def test_yarn_lengthens_the_context(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert open_folder(tmp_path, architectures=["Qwen2ForCausalLM"], rope_scaling=yarn).context_length == 2048
    longer = {"rope_scaling": yarn, "max_position_embeddings": 2100}
    assert open_folder(tmp_path, architectures=["Qwen2ForCausalLM"], **longer).context_length == 2100


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b'{"eos_token_id": {}'])
def test_damaged_files_are_named(name: str, text: bytes, tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / name).write_bytes(text)
    with pytest.raises(ValueError, match=name):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_missing_files_are_named(name: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"has no {name}"):
        open_checkpoint(str(folder))


class TestWeights:
    def folder(self, path: Path, *names: str) -> Path:
        folder = make_config_folder(path)
        for name in names:
            (folder / name).write_bytes(b"")
        return folder

    def index(self, folder: Path, weight_map: Any) -> None:
        write_json(folder, "model.safetensors.index.json", weight_map=weight_map)

    def fails(self, folder: Path, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            open_checkpoint(str(folder))

    def test_shards_are_those_of_the_index(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path, "b.safetensors", "a.safetensors", "consolidated.safetensors")
        self.index(folder, {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"})
        files = open_checkpoint(str(folder)).weights.safetensors
        assert [path.name for path in files] == ["a.safetensors", "b.safetensors"]

    def test_a_missing_shard(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path, "a.safetensors")
        self.index(folder, {"x": "a.safetensors", "y": "b.safetensors"})
        self.fails(folder, "has no b.safetensors")

    @pytest.mark.parametrize("weight_map", [{}, [], None, {"x": 1}, {"x": "../a.safetensors"}, {"x": {}}])
    def test_an_index_that_makes_no_sense(self, tmp_path: Path, weight_map: Any) -> None:
        folder = self.folder(tmp_path, "a.safetensors")
        self.index(folder, weight_map)
        self.fails(folder, "weight_map")

    def test_several_files_without_an_index(self, tmp_path: Path) -> None:
        self.fails(self.folder(tmp_path, "a.safetensors", "b.safetensors"), "no model.safetensors.index.json")

    def test_pickles_only(self, tmp_path: Path) -> None:
        self.fails(self.folder(tmp_path, "pytorch_model.bin"), r"only as \.bin pickles")

    def test_nothing(self, tmp_path: Path) -> None:
        self.fails(self.folder(tmp_path), "no safetensors weights")


def test_the_test_only_model(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_hash_checkpoint(tmp_path, vocab_size=50, eos_token_id=4, max_position=99)))
    assert checkpoint.config == HashConfig(architecture="TandemHashModel", vocab_size=50, max_position=99)
    assert (checkpoint.eos_token_ids, checkpoint.context_length) == ((4,), 99)
    ids = [each for each in range(50) if each != 4]
    assert checkpoint.tokenizer.encode(hash_text(ids)).ids == ids
    assert checkpoint.tokenizer.decode(ids) == hash_text(ids)
    assert checkpoint.tokenizer.decode([4]) == ""
    assert checkpoint.tokenizer.encode("<eos>").ids == [4]
