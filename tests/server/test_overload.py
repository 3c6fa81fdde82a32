"""More load than fits, measured as docs/scheduling.md says: all is answered or refused, and the metrics tell."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.checkpoints import make_hash_checkpoint
from tests.support.server import running_server

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "scheduling.md").read_text()


def test_the_overload_tool_shows_pauses_and_refusals(tmp_path):
    make_hash_checkpoint(tmp_path, vocab_size=64, eos_token_id=2, max_position=256)
    words = tmp_path / "words.txt"
    words.write_text("\n".join(chr(0x4E00 + token) for token in range(3, 64)))
    settings = {"kv_tokens": 600, "max_running": 16, "queue_size": 8}
    (command,) = re.findall(r"^    python (benchmarks/overload.py .*)$", DOC, re.MULTILINE)
    with running_server(model=tmp_path, settings=settings) as server:
        command = command.replace("localhost:8002", server.metrics_url).replace("--rate 8", "--concurrency 40")
        command = command.replace("--duration 300", "--duration 5").replace("16:512", "8:120")
        more = ["--url", server.grpc_url, "--input-tokens", "20", "--words", str(words)]
        done = subprocess.run(
            [sys.executable, *command.split(), *more],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    counted = dict(re.findall(r"^(tandem_\S+) +\+(\d+)$", done.stdout, re.MULTILINE))
    answered, refused = (
        int(counted[f"tandem_requests_{kind}"])
        for kind in ("finished_total{reason=length}", "refused_total{reason=queue_full}")
    )
    assert answered > 50
    assert refused > 0
    assert int(counted["tandem_pauses_total"]) > 0
    assert "tandem_kv_tokens{state=used}" in done.stdout
