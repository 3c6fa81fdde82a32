"""The soak tool for a few seconds: it kills, measures and writes what docs/benchmarking.md says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.faults.growth import trend
from tests.support.checkpoints import make_hash_checkpoint

ROOT = Path(__file__).parents[2]


def test_the_soak_tool_kills_and_measures(tmp_path):
    model = make_hash_checkpoint(tmp_path / "hash", vocab_size=64, eos_token_id=2, max_position=512)
    words = tmp_path / "words.txt"
    words.write_text("\n".join(chr(0x4E00 + token) for token in range(3, 64)))
    plot, figures = tmp_path / "soak.png", tmp_path / "soak.json"
    command = [
        sys.executable, "benchmarks/soak.py", "--minutes", "0.08", "--every", "1", "--kill-every", "2",
        "--model", model, "--set", "kv_tokens=2000", "--words", words, "--json", figures, "--plot", plot,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    assert plot.read_bytes().startswith(b"\x89PNG")
    written = json.loads(figures.read_text())
    samples = [sample["values"] for sample in written["samples"]]
    assert samples[-1]["restarts"] >= 1 and not written["errors"]
    assert {"stream", "cancel", "leave", "deadline", "mistake"} < set(written["asked"])
    last = {name for sample in samples for name in sample}
    assert {"router MiB", "tritonserver descriptors", "worker threads", "KV tokens", "TTFT p99 ms"} < last
    asked = int(re.search(r"^(\d+) requests in", done.stdout, re.MULTILINE)[1])
    assert asked == sum(written["asked"].values()) > 20
    assert re.search(r"^router MiB .* [+-]\d", done.stdout, re.MULTILINE)


def test_what_grows_is_told_from_what_scatters():
    level = [(second, 100.0 + second % 3) for second in range(60)]
    grows = [(second, value + second / 2) for second, value in level]
    assert not trend("level", level).grows
    found = trend("grows", grows)
    assert found.grows and abs(found.per_hour - 1800) < 30
    assert not trend("falls", [(second, -value) for second, value in grows]).grows
    assert not trend("too few", grows[::10]).grows
