"""Configurations of kernels: what is found is kept, and nothing else is believed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kernels import tuning
from kernels.tuning import Config, chosen, tune

DEFAULT = Config({"BLOCK": 64}, 4, 2)
FAST = Config({"BLOCK": 128}, 8, 3)
SLOW = Config({"BLOCK": 32}, 2, 1)


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Path]]:
    """As if there were a GPU; gives where its file is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU / 80 GB")
    tuning._found.cache_clear()
    yield tuning._path
    tuning._found.cache_clear()


class Clock:
    """Times of configurations, which `run` and the timer share: the timer gives what the last run took."""

    def __init__(self, times: dict[int, list[float]]) -> None:
        self.times = times
        self.runs: list[Config] = []

    def run(self, config: Config) -> None:
        self.runs.append(config)
        if config.blocks["BLOCK"] not in self.times:
            raise RuntimeError("out of shared memory")

    def __call__(self, call: Callable[[], None]) -> float:
        call()
        times = self.times[self.runs[-1].blocks["BLOCK"]]
        return times[len(self.runs) % len(times)]


def _new_process() -> None:
    tuning._found.cache_clear()


def test_the_fastest_is_kept_for_processes_that_start_later(gpu: Callable[[], Path]) -> None:
    assert chosen("norm", "4096", DEFAULT) == DEFAULT
    clock = Clock({32: [3.0], 128: [1.0], 64: [2.0]})
    assert tune("norm", "4096", [SLOW, FAST, DEFAULT], clock.run, clock) == FAST
    assert chosen("norm", "4096", DEFAULT) == DEFAULT  # this process has launched kernels, and captured graphs, by now
    _new_process()
    assert chosen("norm", "4096", DEFAULT) == FAST
    assert chosen("norm", "576", DEFAULT) == chosen("heads", "4096", DEFAULT) == DEFAULT


def test_one_slow_run_does_not_decide(gpu: Callable[[], Path]) -> None:
    clock = Clock({128: [1.0, 1.0, 1.0, 50.0], 32: [2.0]})
    assert tune("norm", "4096", [SLOW, FAST], clock.run, clock) == FAST


def test_what_does_not_run_is_no_candidate(gpu: Callable[[], Path]) -> None:
    clock = Clock({32: [3.0]})
    assert tune("norm", "4096", [FAST, SLOW], clock.run, clock) == SLOW
    with pytest.raises(RuntimeError, match="no configuration of norm for 4096 runs"):
        tune("norm", "4096", [FAST], clock.run, clock)


def test_kernels_and_keys_share_a_file(gpu: Callable[[], Path]) -> None:
    clock = Clock({32: [3.0], 128: [1.0]})
    tune("norm", "4096", [SLOW], clock.run, clock)
    tune("heads", "128", [FAST], clock.run, clock)
    _new_process()
    assert chosen("norm", "4096", DEFAULT) == SLOW and chosen("heads", "128", DEFAULT) == FAST
    assert [path.name for path in gpu().parent.iterdir()] == [gpu().name]  # nothing half written is left


def test_the_file_is_named_after_gpu_and_triton_and_is_the_users_own(gpu: Callable[[], Path]) -> None:
    import triton

    assert gpu().name == f"A-GPU-80-GB-triton-{triton.__version__}.json"
    assert gpu().parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", "null", '{"norm 4096": null}', '{"norm 4096": {"blocks": {"BLOCK": 64}, "num_warps": 4}}',
        '{"norm 4096": {"blocks": {"BLOCK": 0}, "num_warps": 4, "num_stages": 2}}',
        '{"norm 4096": {"blocks": {"BLOCK": "64"}, "num_warps": 4, "num_stages": 2}}',
        '{"norm 4096": {"blocks": {"BLOCK": true}, "num_warps": 4, "num_stages": 2}}',
        '{"norm 4096": {"blocks": [64], "num_warps": 4, "num_stages": 2}}', "[" * 100_000, "\udcff",
        " " * (1 << 20) + "{}",
    ],
)  # fmt: skip
def test_a_damaged_file_is_ignored_and_told(
    gpu: Callable[[], Path], caplog: pytest.LogCaptureFixture, text: str
) -> None:
    gpu().write_bytes(text.encode(errors="surrogateescape"))
    assert chosen("norm", "4096", DEFAULT) == DEFAULT
    assert "are not used" in caplog.text and str(gpu()) in caplog.text


def test_tuning_replaces_a_damaged_file(gpu: Callable[[], Path]) -> None:
    gpu().write_text("{")
    clock = Clock({128: [1.0]})
    tune("norm", "4096", [FAST], clock.run, clock)
    _new_process()
    assert chosen("norm", "4096", DEFAULT) == FAST


def test_a_file_that_others_can_write_to_or_a_link_is_ignored(
    gpu: Callable[[], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock({128: [1.0]})
    tune("norm", "4096", [FAST], clock.run, clock)
    gpu().chmod(0o666)
    _new_process()
    assert chosen("norm", "4096", DEFAULT) == DEFAULT
    gpu().chmod(0o600)
    gpu().rename(tmp_path / "elsewhere.json")
    gpu().symlink_to(tmp_path / "elsewhere.json")
    _new_process()
    assert chosen("norm", "4096", DEFAULT) == DEFAULT
    assert caplog.text.count("are not used") == 2


def test_other_blocks_than_the_kernels_own_are_not_taken(gpu: Callable[[], Path]) -> None:
    """As when a kernel has changed since it was tuned."""
    gpu().write_text(json.dumps({"norm 4096": Config({"ROWS": 4, "BLOCK": 64}, 4, 2)._asdict()}))
    assert chosen("norm", "4096", DEFAULT) == DEFAULT


def test_without_a_gpu_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tuning._found.cache_clear()
    assert chosen("norm", "4096", DEFAULT) == DEFAULT
    assert not list(tmp_path.iterdir())
