"""Requests by their clients' ids: who is ended, and that nobody is kept."""

from __future__ import annotations

import pytest

from backend_lib.request import FinishReason, OutputOptions
from backend_lib.router.callers import Callers
from backend_lib.router.reply import ErrorKind, Reply
from tests.support.senders import ListSender

MORE = Reply("a", 1, FinishReason.NONE, 1, OutputOptions())
LAST = MORE._replace(finish=FinishReason.LENGTH)


def test_all_of_an_id_are_ended_and_no_others():
    callers = Callers()
    first, second, other = (callers.enter(name, ListSender()) for name in ("x", "x", "y"))
    callers.cancel("x")
    callers.cancel("nobody")
    assert [caller.is_cancelled() for caller in (first, second, other)] == [True, True, False]


def test_a_later_request_of_the_same_id_is_not_ended():
    callers = Callers()
    callers.enter("x", ListSender())
    callers.cancel("x")
    assert not callers.enter("x", ListSender()).is_cancelled()


def test_a_client_that_goes_by_itself_is_still_seen():
    callers, sender = Callers(), ListSender()
    caller = callers.enter("x", sender)
    sender.cancelled = True
    assert caller.is_cancelled()


@pytest.mark.parametrize(
    "end",
    [
        lambda caller: caller.send(LAST),
        lambda caller: caller.fail(ErrorKind.INTERNAL, "x"),
        lambda caller: caller.send_siblings([LAST], [0], final=True),
    ],
)
def test_the_last_response_is_passed_on_and_ends_the_stay(end):
    callers, sender = Callers(), ListSender()
    caller = callers.enter("x", sender)
    caller.send(MORE)
    caller.send_siblings([MORE], [0], final=False)
    assert len(callers) == 1
    end(caller)
    sender.wait(0)
    assert len(callers) == 0 and sender.replies[0] == MORE
    callers.cancel("x")
    assert not caller.is_cancelled()


def test_a_response_that_cannot_be_sent_ends_it_too():
    def gone(reply: Reply) -> None:
        raise RuntimeError("gone")

    callers = Callers()
    with pytest.raises(RuntimeError):
        callers.enter("x", ListSender(gone)).send(LAST)
    assert len(callers) == 0
