"""What the command line refuses, and what doctor reports, without a server being started."""

from __future__ import annotations

import socket

import pytest

from backend_lib.cli import doctor as report
from backend_lib.cli.main import main
from backend_lib.cli.options import Options
from backend_lib.cli.server import ServerMissingError, TritonServer, find_server
from tests.support.server import free_ports


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--set", "kv_token=5"], "unknown parameter 'kv_token' (did you mean 'kv_tokens'?)"),
        (["--set", "kv_tokens=many"], "parameter 'kv_tokens' is 'many'; allowed is a whole number from 2"),
        (["--set", "kv_tokens"], "--set kv_tokens: expected key=value"),
        (["--name", "a/b"], "--name a/b: expected letters"),
        (["--name", ".."], "--name ..: expected letters"),
        (["--name", "."], "--name .: expected letters"),
        (["--name", "a" * 300], "at most 128"),
        (["--model", "~nobodyx/x"], "model '~nobodyx/x': Could not determine home directory"),
        (["--model", "m" * 5000], f"model '{'m' * 100}…': File name too long"),
        (["--model", ""], "parameter 'model' is empty"),
        (["--set", "model= "], "parameter 'model' is empty"),
        (["--tritonserver", "/nonexistent/tritonserver"], "/nonexistent/tritonserver: no such program"),
        (["--model-repository", "/nonexistent"], "no llm/config.pbtxt in /nonexistent"),
        (["--", "--http-port=http"], "--http-port is 'http'; expected a number"),
        (["--", "--http-port=99999"], "--http-port is '99999'; expected a number from 1 to 65535"),
        (["--", "--grpc-port=9000", "--metrics-port=9000"], "grpc and metrics both have port 9000"),
        (["--", "--allow-http=false"], "leave --allow-http on"),
    ],
)
def test_what_can_not_be_served_is_refused_in_words(arguments, expected, capsys):
    assert main(["serve", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("tandem: ")
    assert expected in captured.err
    assert captured.out == ""


def test_an_occupied_port_is_named_before_anything_starts(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--", f"--grpc-port={port}"]) == 2
    assert f"already in use: grpc 127.0.0.1:{port}" in capsys.readouterr().err


def test_a_model_path_is_made_absolute_and_a_hub_id_is_not(tmp_path, monkeypatch):
    (tmp_path / "weights").mkdir()
    monkeypatch.chdir(tmp_path)
    assert Options(model="weights").settings() == {"model": str(tmp_path / "weights")}
    assert Options(assignments=["model=weights", "kv_tokens=9"]).settings()["model"] == str(tmp_path / "weights")
    assert Options(model="org/name").settings() == {"model": "org/name"}


def test_name_is_the_new_name_of_the_shipped_model_and_the_old_one_of_a_users(tmp_path):
    assert Options(name="mine").source_model == "llm"
    assert Options(name="mine", model_repository=tmp_path).source_model == "mine"


def test_doctor_finds_this_environment_complete(capsys):
    assert main(["doctor", "--", *free_ports()]) == 0
    printed = capsys.readouterr().out
    for subject in (
        "python",
        "numpy",
        "tritonserver",
        "python backend",
        "stub",
        "libraries",
        "gpu",
        "model",
        "http port",
    ):
        assert f" {subject} " in printed
    assert "missing  " not in printed


def test_doctor_says_what_is_missing(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["doctor", "--model", "/nonexistent/model", "--", f"--http-port={port}"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("missing  model") and "/nonexistent/model" in line for line in lines)
    assert any(line.startswith("missing  ports") and f"already in use: http 127.0.0.1:{port}" in line for line in lines)
    assert lines[-1].endswith("missing")


@pytest.mark.parametrize("model", ["~nobodyx/x", "m" * 5000, ""])
def test_doctor_reports_a_model_that_can_be_none(model, capsys):
    assert main(["doctor", "--model", model, "--", *free_ports()]) == 1
    assert any(line.startswith("missing  ") and "model" in line for line in capsys.readouterr().out.splitlines())


def test_doctor_knows_the_models_context(capsys):
    assert main(["doctor", "--set", "max_model_len=9000", "--", *free_ports()]) == 1
    assert "'max_model_len' is 9000; the context of smollm2 is 8192" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "/nonexistent/model"], "model '/nonexistent/model' is not 'smollm2', a folder, a GGUF file or"),
        (["--model", __file__], "test_cli_main.py"),
        (["--set", "max_model_len=9000"], "parameter 'max_model_len' is 9000; the context of smollm2 is 8192"),
    ],
)
def test_a_model_that_can_not_be_opened_is_refused_in_one_sentence(arguments, expected, capsys):
    assert main(["serve", *arguments, "--", *free_ports()]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1


def test_doctor_reports_flags_that_can_not_be(capsys):
    assert main(["doctor", "--", "--http-port=99999"]) == 1
    assert "missing  ports          --http-port is '99999'" in capsys.readouterr().out


def test_doctor_warns_of_numpy_2(monkeypatch):
    monkeypatch.setattr(report, "_installed", lambda name: "2.3.0")
    (finding,) = (each for each in report.examine(Options()) if each.subject == "numpy")
    assert finding.verdict == "missing"
    assert "pip install 'numpy<2'" in finding.text


def test_doctor_tells_a_stub_for_another_python(tmp_path):
    backends = tmp_path / "backends"
    (backends / "python").mkdir(parents=True)
    stub = backends / "python" / "triton_python_backend_stub"
    stub.write_bytes(b"\0libpython3.7.so.1.0\0")
    server = TritonServer(binary=tmp_path / "tritonserver", backends=backends, stub=stub)
    assert report._stub(server).verdict == "missing"
    assert "embeds Python 3.7" in report._stub(server).text


def test_a_server_named_by_the_user_comes_with_the_backends_beside_it(tmp_path):
    binary = tmp_path / "bin" / "tritonserver"
    binary.parent.mkdir()
    binary.write_text("#!/bin/sh\n")
    with pytest.raises(ServerMissingError):
        find_server(binary)
    binary.chmod(0o755)
    server = find_server(binary)
    assert server.backends == tmp_path / "backends"
    assert not server.private_backends
