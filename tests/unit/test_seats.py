"""Which GPU or cores each worker gets, and what is said of settings that the machine cannot follow."""

from __future__ import annotations

import os

import pytest

from backend_lib.checkpoint import Checkpoint, open_checkpoint
from backend_lib.config import Settings
from backend_lib.router import seats
from backend_lib.router.seats import Seat, seat_workers, visible_gpus
from tests.support.checkpoints import make_hash_checkpoint, make_tiny_llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Checkpoint:
    return open_checkpoint(str(make_tiny_llama(tmp_path_factory.mktemp("llama"))))


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Says what a machine has: `visible` is CUDA_VISIBLE_DEVICES, `gpus` are device files, `cores` those allowed."""

    def make(*, visible: str | None = None, gpus: int = 0, cores: set[int] = frozenset({0}), usable: int = 0) -> None:
        for number in range(gpus):
            (tmp_path / f"nvidia{number}").touch()
        for name in ("nvidiactl", "nvidia-uvm", "nvidia-caps"):
            (tmp_path / name).touch()
        monkeypatch.setattr(seats, "_DEVICES", tmp_path)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(seats, "gpu_is_visible", lambda: bool(visible_gpus()))
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores))
        monkeypatch.setattr(seats, "usable_cores", lambda: usable or len(cores))

    return make


def gpus(llama: Checkpoint, **settings) -> list[list[str]]:
    return [[seat.gpu for seat in group] for group in seat_workers(Settings(**settings), llama).seats]


def refused(llama: Checkpoint, **settings) -> str:
    with pytest.raises(ValueError) as caught:
        seat_workers(Settings(**settings), llama)
    return str(caught.value)


@pytest.mark.parametrize(
    "visible, names",
    [(None, ["0", "1", "2"]), ("", []), ("-1", []), ("2,0", ["2", "0"]), ("1, -1, 2", ["1"]), ("none", []),
     ("GPU-8932f937-d72c,MIG-8f2a-11", ["GPU-8932f937-d72c", "MIG-8f2a-11"]), ("NoDevFiles", [])],
)  # fmt: skip
def test_what_is_visible(machine, visible, names) -> None:
    machine(visible=visible, gpus=3)
    assert visible_gpus() == names


def test_gpus_go_to_ranks_group_by_group(machine, llama) -> None:
    machine(gpus=4)
    assert gpus(llama) == [["0"]]
    assert gpus(llama, tensor_parallel=2, data_parallel=2) == [["0", "1"], ["2", "3"]]
    assert gpus(llama, tensor_parallel=2, device="cuda", gpus="3, 1") == [["3", "1"]]
    said = seat_workers(Settings(data_parallel=2, gpus="2,0"), llama)
    assert said.words == "workers compute on the GPUs 2, 0"


def test_numbers_count_among_those_that_the_server_sees(machine, llama) -> None:
    machine(visible="GPU-aa,GPU-bb,5", gpus=8)
    assert gpus(llama, data_parallel=2) == [["GPU-aa"], ["GPU-bb"]]
    assert gpus(llama, data_parallel=2, gpus="2,0") == [["5"], ["GPU-aa"]]


def test_without_a_gpu_nothing_is_set(machine, llama) -> None:
    machine()
    assert gpus(llama, device="cuda", tensor_parallel=2) == [["", ""]]


def test_workers_on_a_cpu_are_given_no_gpu(machine, llama, tmp_path) -> None:
    machine(gpus=1)
    assert gpus(llama, device="cpu", data_parallel=2) == [[""], [""]]
    assert gpus(llama, device="interpret", data_parallel=2) == [[""], [""]]
    hashing = open_checkpoint(
        str(make_hash_checkpoint(tmp_path / "hash", vocab_size=64, eos_token_id=2, max_position=64))
    )
    assert gpus(hashing, data_parallel=2) == [[""], [""]]


@pytest.mark.parametrize(
    "settings, words",
    [
        (
            {"tensor_parallel": 2, "data_parallel": 2},
            "parameter 'data_parallel' is 2 and 'tensor_parallel' 2, which takes 4 GPUs; allowed are as many as are "
            "visible, 3",
        ),
        (
            {"gpus": "0,0", "data_parallel": 2},
            "parameter 'gpus' is '0,0'; allowed is each number once, and 0 is there twice",
        ),
        ({"gpus": "0,3", "data_parallel": 2}, "parameter 'gpus' is '0,3'; allowed are those from 0 to 2"),
        (
            {"gpus": "0,1", "data_parallel": 3},
            "parameter 'gpus' is '0,1'; allowed are as many as there are workers, 3: tensor_parallel 1 times "
            "data_parallel 3",
        ),
        ({"gpus": "0,1,2"}, "parameter 'gpus' is '0,1,2'; allowed are as many as there are workers, 1"),
        ({"gpus": "0", "device": "cpu"}, "parameter 'gpus' is '0'; allowed with device 'cpu' is auto"),
        ({"gpus": "0", "device": "interpret"}, "parameter 'gpus' is '0'; allowed with device 'interpret' is auto"),
        *(
            ({"gpus": text}, f"parameter 'gpus' is '{text}'; allowed is auto, or numbers with commas between them")
            for text in ("all", "0;1", "0,", "-1", "1.0", "0 1", "٣", "0,auto", "99999", "GPU-aa")
        ),
    ],
)  # fmt: skip
def test_what_the_machine_cannot_follow_is_refused_in_words(machine, llama, settings, words) -> None:
    machine(gpus=3)
    assert refused(llama, **settings).startswith(words)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_more_ranks_than_the_checkpoint_can_be_divided_among(machine, llama, device) -> None:
    """Said before a worker is started, of which there could be thousands."""
    machine(gpus=64)
    heads = llama.config.num_heads
    seat_workers(Settings(device=device, tensor_parallel=2, data_parallel=32), llama)
    words = f"parameter 'tensor_parallel' is {heads + 1}; allowed for this checkpoint is at most "
    assert refused(llama, device=device, tensor_parallel=heads + 1).startswith(words)


def test_a_long_text_is_cut(machine, llama) -> None:
    machine(gpus=3)
    assert len(refused(llama, gpus="9" * 5000)) < 200


def test_gpus_that_are_named_where_none_is_visible(machine, llama) -> None:
    machine()
    assert refused(llama, gpus="0") == "parameter 'gpus' is '0'; allowed with workers on the CPU is auto"
    assert (
        refused(llama, gpus="0", device="cuda") == "parameter 'gpus' is '0'; allowed are none, since no GPU is visible"
    )


# Cores.


def cores(llama: Checkpoint, **settings) -> list[list[tuple[int, ...]]]:
    return [[seat.cores for seat in group] for group in seat_workers(Settings(device="cpu", **settings), llama).seats]


def test_one_worker_is_left_alone(machine, llama) -> None:
    machine(cores={2, 3, 4, 5})
    seating = seat_workers(settings := Settings(device="cpu"), llama)
    assert seating == ([[Seat()]], settings, "")


def test_each_worker_has_cores_of_its_own_where_there_are_enough(machine, llama) -> None:
    machine(cores={2, 3, 4, 5, 6, 9, 11, 12, 13})
    assert cores(llama, data_parallel=2) == [[(2, 3, 4, 5)], [(6, 9, 11, 12)]]
    assert cores(llama, tensor_parallel=2, data_parallel=2) == [[(2, 3), (4, 5)], [(6, 9), (11, 12)]]
    said = seat_workers(Settings(device="cpu", data_parallel=2), llama)
    assert said.words == "2 workers have cores of their own: 2, 3, 4, 5; 6, 9, 11, 12" and said.settings.threads is None


def test_a_quota_counts(machine, llama) -> None:
    machine(cores=set(range(8)), usable=4)
    assert cores(llama, data_parallel=2) == [[(0, 1)], [(2, 3)]]


def test_with_fewer_cores_than_workers_they_share_all(machine, llama) -> None:
    machine(cores={0, 1})
    seating = seat_workers(Settings(device="cpu", data_parallel=3), llama)
    assert seating.seats == [[Seat()]] * 3 and seating.settings.threads == 1
    assert seating.words == "3 workers share the cores, of which they may use 2; threads of each: 1"


def test_who_asks_for_more_threads_than_a_share_gets_them_on_all_cores(machine, llama) -> None:
    machine(cores={0, 1, 2, 3})
    seating = seat_workers(Settings(device="cpu", data_parallel=2, threads=3), llama)
    assert seating.seats == [[Seat()]] * 2 and seating.settings.threads == 3
    assert cores(llama, data_parallel=2, threads=2) == [[(0, 1)], [(2, 3)]]
