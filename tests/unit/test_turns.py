"""Who gives way to whom on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from backend_lib.turns import give_way, take_turns

CHILD = """
import os, sys, threading, time
from backend_lib.turns import take_turns
if sys.argv[1] == "take":
    take_turns()
policies = []
thread = threading.Thread(target=lambda: policies.append(os.sched_getscheduler(0)))
thread.start()
thread.join()
print(os.sched_getscheduler(0), policies[0])
"""


def policies_of_a_child(what: str) -> list[int]:
    """Of the main thread and one that it starts, in a process started by one that gives way."""

    def start() -> None:
        give_way(os.getpid())

    run = subprocess.run(
        [sys.executable, "-c", CHILD, what], preexec_fn=start, capture_output=True, text=True, check=True
    )
    return [int(word) for word in run.stdout.split()]


def test_what_is_started_gives_way_too() -> None:
    assert policies_of_a_child("keep") == [os.SCHED_BATCH, os.SCHED_BATCH]


def test_a_worker_takes_turns_though_its_router_gives_way() -> None:
    assert policies_of_a_child("take") == [os.SCHED_OTHER, os.SCHED_OTHER]


def test_all_threads_of_a_process_give_way() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        give_way(os.getpid())
        assert os.sched_getscheduler(thread.native_id or 0) == os.SCHED_BATCH
    finally:
        release.set()
        thread.join()
        for each in Path("/proc/self/task").iterdir():
            os.sched_setscheduler(int(each.name), os.SCHED_OTHER, os.sched_param(0))


def test_a_real_time_policy_is_left_alone_and_a_process_that_is_gone_is_no_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    give_way(process.pid)
    before = os.sched_getscheduler(0)
    take_turns()
    assert os.sched_getscheduler(0) == before == os.SCHED_OTHER
