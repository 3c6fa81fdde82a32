"""A model that answers with the words of its prompt, one a response: for tests of the server without an engine."""

from __future__ import annotations

from pathlib import Path

from backend_lib.cli.repository import SHIPPED_MODEL, shipped_repository

_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            words = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].split()
            for word in words:
                tensor = pb_utils.Tensor("text_output", np.array([word], dtype=object))
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def make_echo_repository(path: Path, name: str = SHIPPED_MODEL) -> Path:
    """A repository in `path` with the shipped configuration and the echo model as `name`."""
    model = path / name
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text(_MODEL)
    (model / "config.pbtxt").write_text((shipped_repository() / SHIPPED_MODEL / "config.pbtxt").read_text())
    return path
