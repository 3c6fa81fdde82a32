"""The response sender, against a stand-in for Triton's module: the real one exists only inside the stub."""

from __future__ import annotations

import sys
import threading
from types import ModuleType

import pytest

from backend_lib.request import FinishReason, OutputOptions
from backend_lib.router.reply import ErrorKind, Reply

LAST = Reply("end", 1, FinishReason.LENGTH, 1, OutputOptions())


class FactoryInUse:
    """Triton's side of a sender: freed by the final response, and not to be looked at while that is under way."""

    def __init__(self) -> None:
        self.sending = threading.Event()
        self.go_on = threading.Event()
        self.freed = False
        self.asked_while_ending = 0

    def send(self, response=None, flags=0) -> None:
        if flags:
            self.sending.set()
            assert self.go_on.wait(10)
            self.freed = True

    def is_cancelled(self) -> bool:
        self.asked_while_ending += self.freed or self.sending.is_set()
        return True


@pytest.fixture
def model(monkeypatch):
    stand_in = ModuleType("triton_python_backend_utils")
    stand_in.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    stand_in.TritonError = type("TritonError", (), {"INTERNAL": 1, "__init__": lambda self, *args: None})
    stand_in.InferenceResponse = lambda *args, **kwargs: object()
    stand_in.Tensor = lambda *args: object()
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stand_in)
    monkeypatch.delitem(sys.modules, "backend_lib.router.model", raising=False)
    import backend_lib.router.model as module

    yield module
    sys.modules.pop("backend_lib.router.model", None)


@pytest.mark.parametrize("end", [lambda sender: sender.send(LAST), lambda sender: sender.fail(ErrorKind.INTERNAL, "x")])
def test_triton_is_never_asked_during_or_after_the_final_response(model, end):
    factory = FactoryInUse()
    sender = model.TritonSender(factory)
    assert sender.is_cancelled()
    ending = threading.Thread(target=end, args=(sender,))
    ending.start()
    assert factory.sending.wait(10)
    asking = threading.Thread(target=sender.is_cancelled)
    asking.start()
    asking.join(0.2)  # it must wait for the final response, or it has asked by now
    factory.go_on.set()
    ending.join(10)
    asking.join(10)
    assert not sender.is_cancelled()
    assert factory.asked_while_ending == 0
