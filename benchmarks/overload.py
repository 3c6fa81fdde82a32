"""What the server does with more load than fits: the load tool's table, and beside it the server's own metrics.

    python benchmarks/overload.py --metrics localhost:8002 -- --rate 8 --duration 300 --output-tokens 16:512

What follows `--` goes to benchmarks/serve.py. Gauges are read once a second; counters are differences over the run.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.serving.cli import main as serve

GAUGES = ("tandem_kv_tokens", "tandem_requests_running", "tandem_requests_waiting", "tandem_requests_paused")
COUNTERS = (
    "tandem_prompt_tokens_total", "tandem_generation_tokens_total", "tandem_prefix_hit_tokens_total",
    "tandem_pauses_total", "tandem_recomputed_tokens_total", "tandem_requests_finished_total",
    "tandem_requests_refused_total",
)  # fmt: skip
PUSH_SECONDS = 2.5  # the server shows a counter's last step this much later at most
_LINE = re.compile(r"^(\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metrics", default="localhost:8002", metavar="ADDRESS", help="the server's metrics address")
    parser.add_argument("load", nargs=argparse.REMAINDER, help="-- and arguments of benchmarks/serve.py")
    args = parser.parse_args()
    before = read_metrics(args.metrics)
    gauges = Gauges(args.metrics)
    code = serve(args.load[1:] if args.load[:1] == ["--"] else args.load)
    gauges.close()
    time.sleep(PUSH_SECONDS)
    after = read_metrics(args.metrics)
    for name in sorted(after):
        if name.startswith(COUNTERS):
            print(f"{name:60} +{after[name] - before.get(name, 0.0):.0f}")
    for name, values in sorted(gauges.seen.items()):
        print(f"{name:60} mean {statistics.fmean(values):.1f}, highest {max(values):.0f}")
    return code


def read_metrics(address: str) -> dict[str, float]:
    """Values by name and labels, without the labels that all of them carry."""
    with urlopen(f"http://{address.removeprefix('http://').removesuffix('/metrics')}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return {_named(name, labels): float(value) for name, labels, value in _LINE.findall(text)}


def _named(name: str, labels: str) -> str:
    own = [f"{key}={value}" for key, value in _LABEL.findall(labels) if key not in ("model", "version")]
    return f"{name}{{{','.join(own)}}}" if own else name


class Gauges:
    """Reads the gauges once a second, in a thread of its own, until closed."""

    def __init__(self, address: str) -> None:
        self.seen: dict[str, list[float]] = defaultdict(list)
        self._address = address
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            for name, value in read_metrics(self._address).items():
                if name.startswith(GAUGES):
                    self.seen[name].append(value)
            if self._done.wait(1.0):
                return


if __name__ == "__main__":
    sys.exit(main())
