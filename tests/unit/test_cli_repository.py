"""The private model repository and its config.pbtxt."""

from __future__ import annotations

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from backend_lib.cli.repository import link_repository, read_parameters, shipped_repository, write_parameters
from backend_lib.config import Settings
from backend_lib.router import tensors

BLOCK = 'parameters { key: "model" value: { string_value: "smollm2" } }\n'
LIST = """parameters [
  { key: "model", value { string_value: "smollm2" } },
  { key: "dtype" value: { string_value: "auto" } }
]
"""


def shipped_config() -> str:
    return (shipped_repository() / "llm" / "config.pbtxt").read_text()


def described(fields) -> list[tuple]:
    """Inputs or outputs as Triton reads them."""
    return [
        (each.name, DataType.Name(each.data_type), list(each.dims), getattr(each, "optional", False)) for each in fields
    ]


def known(specs) -> list[tuple]:
    """The same as the router describes them."""
    return [(each["name"], each["data_type"], each["dims"], each.get("optional", False)) for each in specs]


def as_triton_reads(config: str) -> dict[str, str]:
    parsed = text_format.Parse(config, ModelConfig())
    return {key: value.string_value for key, value in parsed.parameters.items()}


def test_the_shipped_configuration_is_what_triton_understands():
    config = text_format.Parse(shipped_config(), ModelConfig())
    assert config.model_transaction_policy.decoupled
    assert described(config.input) == [
        each for each in known(tensors.declared_inputs("vllm")) if each[0] != tensors.STOP
    ]
    assert described(config.output) == known(tensors.declared_outputs("vllm"))
    assert Settings.from_parameters(read_parameters(shipped_config())) == Settings()


@pytest.mark.parametrize("config", [BLOCK, LIST, "", "# " + BLOCK])
def test_settings_replace_or_join_what_is_there(config):
    written = write_parameters(config, {"model": "/m x", "kv_tokens": "64"})
    expected = {**as_triton_reads(config), "model": "/m x", "kv_tokens": "64"}
    assert as_triton_reads(written) == expected == read_parameters(written)


@given(st.text(st.characters(min_codepoint=32, max_codepoint=0x2FFF, exclude_categories=("Cc", "Cs")), min_size=1))
def test_any_text_survives_the_writing(value):
    for config in (BLOCK, LIST, ""):
        assert as_triton_reads(write_parameters(config, {"model": value}))["model"] == value
        assert read_parameters(write_parameters(config, {"model": value}))["model"] == value


def test_a_model_is_renamed_and_its_neighbours_stay(tmp_path):
    for model in ("llm", "other"):
        (tmp_path / "source" / model / "1").mkdir(parents=True)
        (tmp_path / "source" / model / "config.pbtxt").write_text(f'name: "{model}"\n')
    link_repository(tmp_path / "source", tmp_path / "target", rename=("llm", "mine"), settings={"dtype": "auto"})
    assert sorted(each.name for each in (tmp_path / "target").iterdir()) == ["mine", "other"]
    assert (tmp_path / "target/mine/1").resolve() == tmp_path / "source/llm/1"
    assert text_format.Parse((tmp_path / "target/mine/config.pbtxt").read_text(), ModelConfig()).name == "mine"
    assert "dtype" not in (tmp_path / "source/llm/config.pbtxt").read_text()


def test_a_repository_without_the_model_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no llm/config.pbtxt in"):
        link_repository(tmp_path, tmp_path / "target", rename=("llm", "llm"), settings={})
