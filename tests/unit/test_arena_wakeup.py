"""Doorbells: no ring is lost, and many are heard once."""

from __future__ import annotations

import os
import threading
import time

import pytest

from backend_lib.arena import Doorbell


@pytest.fixture
def bell():
    bell = Doorbell()
    yield bell
    bell.close()


@pytest.mark.parametrize("timeout", [None, 0, 0.5])
def test_rung_before_the_wait_is_heard(bell, timeout):
    bell.ring()
    assert bell.wait(timeout)


def test_rung_many_times_is_heard_once(bell):
    for _ in range(1000):
        bell.ring()
    assert bell.wait(0)
    assert not bell.wait(0)


def test_silence_times_out(bell):
    start = time.monotonic()
    assert not bell.wait(0.02)
    assert 0.019 <= time.monotonic() - start < 2


def test_a_deadline_that_has_passed_does_not_block(bell):
    heard = []
    waiter = threading.Thread(target=lambda: heard.append(bell.wait(-0.001)), daemon=True)
    waiter.start()
    waiter.join(2)
    alive = waiter.is_alive()
    bell.ring()  # lets a waiter that blocks go
    assert not alive
    assert heard == [False]
    assert bell.wait(-0.001)


@pytest.mark.parametrize("timeout", [None, 5])
def test_a_ring_wakes_a_waiter(bell, timeout):
    start = time.monotonic()
    ringer = threading.Timer(0.02, bell.ring)
    ringer.start()
    assert bell.wait(timeout)
    assert 0.015 < time.monotonic() - start < 2
    ringer.join()


def test_the_same_descriptor_is_the_same_bell(bell):
    Doorbell(bell.fd).ring()
    assert bell.wait(0)


def test_a_bell_is_not_inherited_unless_passed(bell):
    assert not os.get_inheritable(bell.fd)


def test_a_closed_bell_is_gone():
    bell = Doorbell()
    bell.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        bell.ring()
