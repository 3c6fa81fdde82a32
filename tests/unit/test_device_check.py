"""The check for a machine with a GPU: all of its code, tiny, in Triton's interpreter, and how it bears what fails."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import device_check
from benchmarks.device import gpu, guarded
from benchmarks.device.count import layer_passes, step_bytes
from benchmarks.device.gpu import Kernel, busy_us
from benchmarks.device.kernel_checks import DENSE
from benchmarks.device.report import BEGUN, Broken, Report, Sheet, is_trouble, table
from benchmarks.device.requests import chat_lengths
from benchmarks.device.sampling_checks import SAMPLING
from benchmarks.device.scale import LLAMA_8B, REAL
from benchmarks.device.stages import BROKEN, STAGES
from kernels.compiling import modules

ROOT = Path(__file__).parents[2]


def dry_run(out: Path, stages: list[str]) -> dict:
    command = [sys.executable, "-m", "benchmarks.device_check", "--dry-run", "--budget", "400", "--out", str(out)]
    run = subprocess.run([*command, "--stages", *stages], cwd=ROOT, capture_output=True, text=True, timeout=480)
    found = json.loads(out.read_text())
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    assert {name: stage["state"] for name, stage in found.items()} == dict.fromkeys(stages, "done")
    assert not [item for stage in found.values() for item in stage["items"].values() if is_trouble(item)]
    assert "skipped" not in out.read_text() and "0 failed or wrong" in run.stdout
    return found


def test_stages_run(tmp_path: Path) -> None:
    """Those without which the others say nothing, and the one with most processes."""
    found = dry_run(tmp_path / "check.json", ["environment", "kernels", "serving"])
    delivered = found["serving"]["items"]["delivered"]
    assert delivered["tokens"] > 0 and delivered["replies"] > 0


@pytest.mark.long
def test_every_stage_runs(tmp_path: Path) -> None:
    found = dry_run(tmp_path / "check.json", list(STAGES))
    assert found["tokens"]["items"]["beside transformers"]["tokens"] == 6
    assert found["tuning"]["items"]["decode_attention"]["ran"] == 2


def test_every_kernel_module_is_checked() -> None:
    checked = " ".join([*DENSE, *SAMPLING])
    assert [name for each in modules() if (name := each.removeprefix("kernels.")) not in checked] == []


class TestSheet:
    def sheet(self, path: Path, *, seconds: float = 60.0, is_alive: bool = True) -> Sheet:
        return Sheet(Report(path), "stage", time.monotonic() + seconds, lambda: is_alive)

    def test_goes_on_after_a_failure(self, tmp_path: Path) -> None:
        sheet = self.sheet(tmp_path / "a.json")
        assert sheet.attempt("bad", lambda: 1 // 0) is None
        assert sheet.attempt("good", lambda each: each + 1, 4) == 5
        saved = Report(tmp_path / "a.json").stage("stage")["items"]
        assert "ZeroDivisionError" in saved["bad"]["error"] and saved["good"] == 5
        assert [is_trouble(each) for each in saved.values()] == [True, False]

    def test_skips_when_the_time_is_nearly_over(self, tmp_path: Path) -> None:
        sheet = self.sheet(tmp_path / "a.json", seconds=5)
        assert sheet.attempt("long", lambda: 1, needs=6) is None
        assert sheet.attempt("short", lambda: 1, needs=1) == 1
        assert sheet.items["long"]["skipped"].endswith("it needs 6") and not is_trouble(sheet.items["long"])

    def test_a_lost_context_ends_it(self, tmp_path: Path) -> None:
        with pytest.raises(Broken):
            self.sheet(tmp_path / "a.json", is_alive=False).attempt("bad", lambda: 1 // 0)
        assert "ZeroDivisionError" in Report(tmp_path / "a.json").stage("stage")["items"]["bad"]["error"]

    def test_the_next_process_goes_on_behind_what_killed_the_first(self, tmp_path: Path) -> None:
        first = self.sheet(tmp_path / "a.json")
        first.put("done", 1)
        first.put("deadly", BEGUN)
        report = Report(tmp_path / "a.json")
        assert report.bury("it is dead") == 1
        second = Sheet(report, "stage", time.monotonic() + 60, lambda: True)
        tried = [second.attempt(name, lambda: 2) for name in ("done", "deadly", "next")]
        assert tried == [None, None, 2] and second.items["deadly"] == {"error": "it is dead"}
        assert "FAILED: it is dead" in table(report)


class TestProcesses:
    """What becomes of the stages when their processes end in a way that is not theirs to choose."""

    def run_all(self, monkeypatch: pytest.MonkeyPatch, path: Path, process) -> tuple[Report, list[list[str]]]:
        asked: list[list[str]] = []

        def run(path: Path, deadline: float, stages: list[str], *, is_dry: bool) -> int:
            asked.append(list(stages))
            return process(Report(path), stages, len(asked))

        monkeypatch.setattr(device_check, "_run", run)
        return device_check._run_all(path, time.monotonic() + 60, ["a", "b", "c"], is_dry=True), asked

    def test_one_that_dies_is_followed(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def process(report: Report, stages: list[str], number: int) -> int:
            for name in stages:
                if name == "b" and number == 1:
                    report.stage("b")["items"]["deadly"] = BEGUN
                    report.save()
                    return 1
                report.stage(name)["state"] = "done"
            report.save()
            return 0

        report, asked = self.run_all(monkeypatch, tmp_path / "a.json", process)
        assert asked == [["a", "b", "c"], ["b", "c"]]
        assert [stage["state"] for stage in report.stages.values()] == ["done"] * 3
        assert "ended with 1" in report.stages["b"]["items"]["deadly"]["error"]

    def test_a_stage_that_always_dies_is_given_up(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def process(report: Report, stages: list[str], number: int) -> int:
            if stages[0] == "a":
                report.stage("a")["items"][f"item {number}"] = BEGUN
                report.save()
                return BROKEN
            for name in stages:
                report.stage(name)["state"] = "done"
            report.save()
            return 0

        report, asked = self.run_all(monkeypatch, tmp_path / "a.json", process)
        assert asked == [["a", "b", "c"]] * device_check.MAX_DEATHS + [["b", "c"]]
        assert report.stages["a"]["state"].startswith("given up") and report.stages["c"]["state"] == "done"

    def test_one_that_cannot_start_is_not_tried_for_ever(self, monkeypatch, tmp_path: Path) -> None:
        report, asked = self.run_all(monkeypatch, tmp_path / "a.json", lambda report, stages, number: 2)
        assert asked == [["a", "b", "c"], ["b", "c"], ["c"]]
        assert all(stage["state"].startswith("given up") for stage in report.stages.values())


def test_busy_time_counts_overlap_once() -> None:
    assert busy_us([Kernel("a", 0, 10), Kernel("c", 30, 5), Kernel("b", 5, 10), Kernel("d", 31, 1)]) == 20
    assert busy_us([]) == 0


def test_what_is_written_beside_an_output_is_found() -> None:
    out = guarded.Guarded(2, 3, dtype=torch.float32, device=gpu.Cpu.device)
    assert not guarded.close(out.view, torch.zeros(2, 3), out)["ok"]  # NaN still
    out.view.zero_()
    assert guarded.close(out.view, torch.zeros(2, 3), out)["ok"]
    assert not guarded.close(out.view, torch.full((2, 3), 1e-3), out)["ok"]
    out._whole[-1, 0] = 0.0
    assert not guarded.close(out.view, torch.zeros(2, 3), out)["ok"]


def test_passes_are_the_launches_of_a_layer() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.device_check", "--count"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(layer_passes(LLAMA_8B)) == 10
    assert "10 launches a layer, 330 in all" in done.stdout


def test_bytes_of_a_step() -> None:
    found = step_bytes(LLAMA_8B, 16, 2048)
    assert found["weights"] == 2 * (8030261248 - 128256 * 4096 - 65 * 4096)  # all but the embedding and the norms
    assert found["kv"] == 16 * 2048 * 131072


def test_lengths_of_conversations() -> None:
    lengths = chat_lengths(REAL)
    assert len(lengths) == 1000 and lengths == chat_lengths(REAL)
    for place, mean in enumerate(REAL.lengths):
        values = [each[place] for each in lengths]
        assert 0.85 * mean < sum(values) / 1000 < 1.1 * mean and max(values) <= 8 * mean and min(values) >= 1
