"""Hugging Face folders whose files lie, or are no files at all; and that nothing anywhere reads a pickle."""

import ast
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backend_lib.checkpoint.untrusted import parser_errors
from tests.support.families import make_variant
from tests.support.hostile import Opener, openers, refusal

ROOT = Path(__file__).parents[2]
INDEX = "model.safetensors.index.json"
JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", INDEX)
TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja")
SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    folder = make_variant(tmp_path_factory.mktemp("good") / "llama", "llama", shard_size="400KB")
    assert set(JSON_FILES) | {SHARD} <= {path.name for path in folder.iterdir()}
    return folder


@pytest.fixture(scope="module")
def sides(good: Path) -> Iterator[list[Opener]]:
    with openers(good) as both:
        yield both


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    copy = Path(shutil.copytree(good, tmp_path / "liar"))
    (copy / "additional_chat_templates").mkdir()
    lie(copy / "tokenizer_config.json", chat_template=None)  # or chat_template.json would not be looked at
    return copy


def lie(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000; supported is a whole number of at most 40"),
        ({"hidden_size": 10**12}, "'hidden_size' is 1000000000000; supported is a whole number of at most 2147483647"),
        ({"vocab_size": 10**400}, "'vocab_size' is 1000"),
        ({"head_dim": 0}, "'head_dim' is 0; supported is a whole number of at least 1"),
        ({"head_dim": -20}, "'head_dim' is -20"),
        ({"head_dim": 10**9}, "head_dim 1000000000 is too large; supported is at most 16384"),
        ({"max_position_embeddings": 10**9}, "context 1000000000 is too large; supported is at most 16777216"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' is nan; supported is a number above 0"),
        ({"rms_norm_eps": 10**400}, "'rms_norm_eps' is 1000"),
        ({"architectures": [["LlamaForCausalLM"]]}, "'architectures' is [['LlamaForCausalLM']]"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": [{}] * 4}, "'layer_types' is [{}, {}, {}, {}]"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "rope_theta": 1.0}}, "the rotary base is 1.0"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": float("inf")}}, "'factor' is inf"),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 1}}, "is 1; supported is"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [10**400], "long_factor": [1]}},
            "'short_factor' is [1000",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [0] * 10, "long_factor": [1] * 10}},
            "rotary factors must be numbers above 0",
        ),
    ],
)  # fmt: skip
def test_a_configuration_that_lies(values: dict[str, Any], words: str, sides, folder: Path) -> None:
    lie(folder / "config.json", **values)
    assert words in (said := refusal(sides, folder))
    assert said.startswith(str(folder / "config.json"))


@pytest.mark.parametrize(
    "values",
    [{"hidden_size": 1 << 30, "head_dim": 20}, {"intermediate_size": 1 << 30}, {"vocab_size": 1 << 30}],
)
def test_sizes_that_the_tensors_do_not_have_cost_no_memory(values: dict[str, Any], sides, folder: Path) -> None:
    lie(folder / "config.json", **values)
    words = refusal(sides[1:], folder)  # the worker's; the router looks at no tensor
    assert str(folder) in words
    assert f"the configuration asks for [{1 << 30}" in words or f", {1 << 30}]" in words


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"a": "\xff"}', b"[" * 100_000, b'{"a":' * 100_000, b"\x00" * 100, b"9" * 10_000],
    ids=["nothing", "cut", "a list", "null", "no UTF-8", "deep lists", "deep objects", "zeros", "digits"],
)
def test_json_that_is_none(name: str, content: bytes, sides, folder: Path) -> None:
    (folder / name).write_bytes(content)
    assert str(folder / name) in refusal(sides, folder)


@pytest.mark.parametrize("name", [*JSON_FILES, *TEMPLATES, SHARD])
@pytest.mark.parametrize("kind", ["pipe", "folder", "link to itself", "link to nothing"])
def test_no_regular_file(kind: str, name: str, sides, folder: Path) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    {
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "link to itself": lambda: path.symlink_to(path),
        "link to nothing": lambda: path.symlink_to(folder / "nothing"),
    }[kind]()
    assert str(path) in refusal(sides, folder)


@pytest.mark.parametrize("name", [*JSON_FILES, *TEMPLATES])
def test_a_terabyte_of_nothing(name: str, sides, folder: Path) -> None:
    (folder / name).touch()
    os.truncate(folder / name, 1 << 40)
    assert f"{folder / name} has {1 << 40} bytes; supported are at most" in refusal(sides, folder)


def test_a_link_in_a_circle_as_the_model(sides, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert str(loop) in refusal(sides, loop)


# Weights.


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../stolen.safetensors", INDEX), ("/etc/passwd", INDEX), ("..", INDEX), ("", INDEX),
        ("a\0.safetensors", "a\\x00"),
        ("\ud800.safetensors", "cannot be the name of a file"), ("pytorch_model.bin", INDEX), (None, INDEX),
        ("missing.safetensors", "has no missing.safetensors"), ("x" * 5000 + ".safetensors", "name too long"),
    ],
)  # fmt: skip
def test_an_index_that_leads_elsewhere(name: str | None, words: str, sides, folder: Path) -> None:
    (folder.parent / "stolen.safetensors").write_bytes((folder / SHARD).read_bytes())
    (folder / "pytorch_model.bin").write_bytes(b"")
    lie(folder / INDEX, weight_map={"x": name})
    assert words in refusal(sides, folder)


def header_of(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def write_header(path: Path, header: bytes, length: int | None = None) -> None:
    content = path.read_bytes()
    data = content[8 + int.from_bytes(content[:8], "little") :]
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)


@pytest.mark.parametrize("length", [0, 1, 1 << 20, 100_000_001, 1 << 32, 1 << 63, (1 << 64) - 1])
def test_a_header_whose_length_lies(length: int, sides, folder: Path) -> None:
    write_header(folder / SHARD, json.dumps(header_of(folder / SHARD)).encode(), length)
    assert f"{folder / SHARD} is not a whole safetensors file" in refusal(sides[1:], folder)


@pytest.mark.parametrize("header", [b"[]", b"7", b"{", b"\xff{}", b"[" * 10_000, b'{"a":' * 10_000, b'{"a": {}}'])
def test_a_header_that_is_no_header(header: bytes, sides, folder: Path) -> None:
    write_header(folder / SHARD, header)
    assert f"{folder / SHARD} is not a whole safetensors file" in refusal(sides[1:], folder)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "I64"}, {"dtype": "F33"}, {"dtype": 4}, {"shape": [1, 2]}, {"shape": [-1]}, {"shape": [1 << 63, 4]},
        {"shape": "x"}, {"shape": [0.5]}, {"data_offsets": [0, 1 << 62]}, {"data_offsets": [8, 0]},
        {"data_offsets": [-8, 0]},
        {"data_offsets": [0, 10**30]}, {"data_offsets": []}, {"dtype": "I32"}, {"shape": [48, 1]}, {"shape": [2, 24]},
    ],
)  # fmt: skip
def test_a_tensor_that_is_not_as_its_header_says(entry: dict[str, Any], sides, folder: Path) -> None:
    header = header_of(folder / SHARD)
    name = "model.layers.0.input_layernorm.weight"
    header[name] |= entry
    write_header(folder / SHARD, json.dumps(header).encode())
    assert str(folder / SHARD) in refusal(sides[1:], folder)


def test_every_cut_of_a_shard(sides, folder: Path) -> None:
    whole = (folder / SHARD).read_bytes()
    for length in (*range(10), 100, 1000, len(whole) // 2, len(whole) - 1):
        (folder / SHARD).write_bytes(whole[:length])
        assert f"{folder / SHARD} is not a whole safetensors file" in refusal(sides[1:], folder)


def test_what_a_library_raises_becomes_words() -> None:
    panic = type("PanicException", (BaseException,), {})  # as Rust's come to Python: no Exception, and of no module
    for error in (panic("index out of bounds"), TypeError("x" * 10_000)):
        with pytest.raises(ValueError, match=r"^tokenizer\.json: (index|x)") as raised, parser_errors("tokenizer.json"):
            raise error
        assert len(str(raised.value)) < 1000
    for kind in (KeyboardInterrupt, MemoryError):
        with pytest.raises(kind), parser_errors("tokenizer.json"):
            raise kind


# Pickles.


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused(name: str, sides, folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    (folder / name).write_bytes(b"")
    assert "pickles, which are not read; convert them to safetensors" in refusal(sides, folder)


READS_PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def pickles_in(source: str) -> list[str]:
    """What in a module could run code that a file brings along."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in READS_PICKLES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in READS_PICKLES:
            found.append(node.module)
        elif isinstance(node, ast.Call):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            is_safe = given.get("weights_only") == "True" or ast.unparse(node.func) != "torch.load"
            if not is_safe or given.get("allow_pickle", "False") != "False":
                found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ("import pickle", 1), ("from pickle import loads as l", 1), ("import os, _pickle as p", 1),
        ("torch.load(f)", 1),
        ("torch.load(f, weights_only=False)", 1), ("torch.load(f, weights_only=True)", 0),
        ("json.load(f)", 0),
        ("np.load(f, allow_pickle=True)", 1), ("np.load(f)", 0), ("def f():\n    import dill", 1),
    ],
)  # fmt: skip
def test_what_counts_as_a_pickle(source: str, number: int) -> None:
    assert len(pickles_in(source)) == number


def test_no_module_reads_pickles() -> None:
    modules = [path for top in ("backend_lib", "kernels", "model_repository") for path in (ROOT / top).rglob("*.py")]
    assert len(modules) > 90
    assert {str(path): found for path in modules if (found := pickles_in(path.read_text()))} == {}
