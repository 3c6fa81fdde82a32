"""How many cores a worker uses, from trees of control groups as containers see them."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_lib.cores import usable_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def cores(folder: Path, own: str | bytes, files: dict[str, str | bytes]) -> int:
    """With `own` as /proc/self/cgroup and `files` below the root."""
    for name, content in {"own": own, **{f"root/{name}": content for name, content in files.items()}}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return usable_cores(folder / "root", folder / "own")


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 8), ("50000 100000", 1), ("100000 100000", 1), ("250000 100000", 2), ("300000 100000\n", 3),
     ("799999 100000", 7), ("800000 100000", 8), ("6400000 100000", 8), ("25000 10000", 2), ("1000 100000", 1)],
)  # fmt: skip
def test_a_quota_of_version_2(quota: str, expected: int, tmp_path: Path) -> None:
    assert cores(tmp_path, "0::/\n", {"cpu.max": quota}) == expected


@pytest.mark.parametrize(
    ("quota", "period", "expected"),
    [("-1", "100000", 8), ("50000", "100000", 1), ("250000", "100000", 2), ("400000", "50000", 8)],
)
@pytest.mark.parametrize("mounted", ["cpu", "cpu,cpuacct"])
def test_a_quota_of_version_1(quota: str, period: str, expected: int, mounted: str, tmp_path: Path) -> None:
    own = "12:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n"
    folder = f"{mounted}/docker/abc"
    files = {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": period}
    assert cores(tmp_path, own, files) == expected


def test_a_container_of_version_1_has_its_own_group_at_the_root(tmp_path: Path) -> None:
    files = {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}
    assert cores(tmp_path, "4:cpu,cpuacct:/docker/abc\n", files) == 3
    assert cores(tmp_path, "", files) == 3


@pytest.mark.parametrize("limited", ["", "kubepods/", "kubepods/pod1/", "kubepods/pod1/llm/"])
def test_the_least_of_all_groups_around(limited: str, tmp_path: Path) -> None:
    files = {f"{each}cpu.max": "500000 100000" for each in ("kubepods/", "kubepods/pod1/", "kubepods/pod1/llm/")}
    files["kubepods/pod2/cpu.max"] = "100000 100000"  # a neighbour's
    files["kubepods/pod1/llm/other/cpu.max"] = "100000 100000"
    assert cores(tmp_path, "0::/kubepods/pod1/llm\n", files) == 5
    assert cores(tmp_path, "0::/kubepods/pod1/llm\n", files | {f"{limited}cpu.max": "200000 100000"}) == 2


def test_another_controllers_group_does_not_count(tmp_path: Path) -> None:
    files = {"cpu/other/cpu.cfs_quota_us": "100000", "cpu/other/cpu.cfs_period_us": "100000"}
    assert cores(tmp_path, "3:cpuset:/other\n", files) == 8
    assert cores(tmp_path, "3:cpuset:/other\n4:cpu:/other\n", files) == 1


def test_a_group_outside_of_the_mount_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000")
    assert cores(tmp_path, "0::/../\n", {"cpu.max": "400000 100000"}) == 4


def test_affinity_that_is_smaller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for allowed, expected in (({3}, 1), ({0, 5}, 2), (set(range(6)), 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, allowed=allowed: allowed)
        assert cores(tmp_path, "0::/\n", {"cpu.max": "400000 100000"}) == expected


def test_no_control_groups_at_all(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "root", tmp_path / "own") == 8
    (tmp_path / "own").mkdir()
    assert usable_cores(tmp_path / "root", tmp_path / "own") == 8


@pytest.mark.parametrize(
    "content",
    ["", "\n", "max", "many 100000", "100000", "100000 0", "0 100000", "-5 100000", "1e5 1e5", "100000 100000 7",
     "100000 -100000", b"\xff\xfe\x00", "9" * 5000 + " 100000"],
)  # fmt: skip
def test_files_without_sense_are_no_limit(content: str | bytes, tmp_path: Path) -> None:
    assert cores(tmp_path, "0::/\n4:cpu:/\n", {"cpu.max": content, "cpu/cpu.cfs_quota_us": content}) == 8


@given(own=st.one_of(st.binary(max_size=60), st.text(":/cpu,.\n\0x", max_size=60)), quota=st.binary(max_size=20))
def test_nothing_makes_it_fail(own: bytes | str, quota: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "cores"
    assert 1 <= cores(folder, own, {"cpu.max": quota, "cpu/cpu.max": b"800000 100000"}) <= 8


def test_this_process() -> None:
    assert 1 <= usable_cores() <= 8
