"""Reply threads: one at a time in a stream, and no mark is lost."""

from __future__ import annotations

import threading
import time
from collections import Counter

from backend_lib.router.reply_pool import ReplyPool


def new_streams(count: int) -> list:
    return [object() for _ in range(count)]


def test_one_thread_at_a_time_and_the_last_state_is_always_seen() -> None:
    """Each stream is a counter that is raised and then marked; work copies it, slowly."""
    streams = new_streams(8)
    produced, seen, inside, faults = Counter(), Counter(), Counter(), []

    def work(stream) -> None:
        inside[stream] += 1
        if inside[stream] != 1:
            faults.append("two threads in one stream")
        now = produced[stream]
        time.sleep(0.0002)
        if now < seen[stream]:
            faults.append("went back")
        seen[stream] = now
        inside[stream] -= 1

    def produce(stream) -> None:
        for _ in range(200):
            produced[stream] += 1
            pool.mark(stream)
            time.sleep(0.0001)

    pool = ReplyPool(4, work)
    threads = [threading.Thread(target=produce, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.close()
    assert not faults
    assert seen == produced
    assert not pool._marks


def test_a_mark_during_work_brings_exactly_one_more_turn() -> None:
    (stream,) = new_streams(1)
    started, go_on, turns = threading.Event(), threading.Event(), []

    def work(stream) -> None:
        turns.append(stream)
        started.set()
        go_on.wait(5)

    pool = ReplyPool(4, work)
    pool.mark(stream)
    started.wait(5)
    for _ in range(5):
        pool.mark(stream)
    go_on.set()
    pool.close()
    assert turns == [stream, stream]


def test_close_works_off_what_is_marked_while_a_slow_send_is_under_way() -> None:
    """The mark comes while the stream is worked on, so its turn is queued only after close has begun."""
    (stream,) = new_streams(1)
    started, go_on, turns = threading.Event(), threading.Event(), []

    def work(stream) -> None:
        turns.append(stream)
        started.set()
        go_on.wait(5)

    pool = ReplyPool(2, work)
    pool.mark(stream)
    started.wait(5)
    pool.mark(stream)
    closer = threading.Thread(target=pool.close)
    closer.start()
    time.sleep(0.05)
    go_on.set()
    closer.join(5)
    assert not closer.is_alive()
    assert len(turns) == 2


def test_other_streams_are_served_while_one_waits() -> None:
    slow, quick = new_streams(2)
    go_on, served = threading.Event(), threading.Event()
    pool = ReplyPool(2, lambda stream: go_on.wait(5) if stream is slow else served.set())
    pool.mark(slow)
    pool.mark(quick)
    assert served.wait(2)
    go_on.set()
    pool.close()


def test_a_failure_costs_no_thread() -> None:
    served = []

    def work(stream) -> None:
        served.append(stream)
        raise RuntimeError("no such client")

    streams = new_streams(5)
    pool = ReplyPool(1, work)
    for stream in streams:
        pool.mark(stream)
    pool.close()
    assert served == streams
