"""The Triton model. It turns Triton's objects into the router's and back, and does nothing else."""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from backend_lib.config import Settings
from backend_lib.router import tensors
from backend_lib.router.finished import refused
from backend_lib.router.intake import Inbound
from backend_lib.router.kinds import load_json
from backend_lib.router.metrics_pusher import Pusher
from backend_lib.router.predecessor import has_predecessor
from backend_lib.router.reply import ErrorKind, Reply
from backend_lib.router.router import Router
from backend_lib.router.triton_registry import TritonRegistry

log = logging.getLogger("tandem")


class TritonPythonModel:
    """What Triton's Python backend calls: `initialize` once, `execute` per request, `finalize` at unload."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Called in a process of its own before the model is loaded. What is there already is left as it is."""
        given = config.as_dict()
        names = {tensor["name"] for tensor in [*given["input"], *given["output"]]}
        contract = _contract(given)
        for tensor in tensors.declared_inputs(contract):
            if tensor["name"] not in names:
                config.add_input(tensor)
        for tensor in tensors.declared_outputs(contract):
            if tensor["name"] not in names:
                config.add_output(tensor)
        config.set_max_batch_size(tensors.BATCH_SIZES[contract])
        config.set_model_transaction_policy({"decoupled": True})
        return config

    def initialize(self, args: dict[str, str]) -> None:
        _set_up_logging()
        server = os.pidfd_open(os.getppid())
        threading.Thread(target=_end_with_triton, args=(server,), daemon=True).start()
        config = json.loads(args["model_config"])
        try:
            _check_instances(config)
            settings = Settings.from_parameters(_settings(config))
            is_serving = partial(_is_serving, args["model_name"], args["model_version"])
            self._router = Router(settings, is_serving=is_serving, server=server)
        except (ValueError, RuntimeError, OSError) as error:
            raise pb_utils.TritonModelException(str(error)) from error
        self._contract = settings.contract
        self._pusher = _start_metrics(self._router, args)

    def execute(self, requests: list[Any]) -> None:
        """Decoupled: every answer goes through a request's sender, so there is nothing to return."""
        for request in requests:
            sender = TritonSender(request.get_response_sender(), contract=self._contract)
            try:
                inbound = _inbound(request, sender)
            except Exception as error:  # whatever Triton cannot decode: this request's fault, not the batch's
                sender.fail(ErrorKind.INVALID_ARG, f"the request cannot be read: {error}")
                refused(self._router.metrics, "", "invalid", ErrorKind.INVALID_ARG)
            else:
                self._router.submit(inbound)

    def is_ready(self) -> bool:
        """Asked by releases of Triton that let a model speak for its own readiness."""
        return self._router.is_ready()

    def finalize(self) -> None:
        self._router.close()
        self._pusher.close()


class TritonSender:
    """One request's response sender.

    The final response frees what `is_cancelled` looks at, and tritonserver dies when it is asked meanwhile or later.
    So the two exclude each other, and afterwards Triton is not asked again.
    """

    def __init__(self, sender: Any, *, contract: str = tensors.VLLM) -> None:
        self._sender = sender
        self._contract = contract
        self._final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL  # not there yet while this module is imported
        self._lock = threading.Lock()
        self._is_over = False

    def send(self, reply: Reply) -> None:
        self._respond(tensors.response([reply], contract=self._contract), final=bool(reply.finish))

    def send_siblings(self, replies: list[Reply], news: list[int], *, final: bool) -> None:
        self._respond(tensors.response(replies, news, self._contract), final=final)

    def fail(self, kind: ErrorKind, message: str) -> None:
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, kind.value))
        self._end(pb_utils.InferenceResponse(error=error))

    def is_cancelled(self) -> bool:
        with self._lock:
            return not self._is_over and self._sender.is_cancelled()

    def _respond(self, arrays: dict[str, np.ndarray], *, final: bool) -> None:
        response = pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in arrays.items()])
        if final:
            self._end(response)
        else:
            self._sender.send(response)

    def _end(self, response: Any) -> None:
        with self._lock:
            self._is_over = True
            self._sender.send(response, flags=self._final)


def _set_up_logging() -> None:
    """To stderr, which is Triton's log. A request's line is JSON and nothing else, for programs that read the log."""
    logging.basicConfig(level=logging.INFO, format="tandem router: %(message)s", stream=sys.stderr)
    requests = logging.getLogger("tandem.request")
    requests.propagate = False
    requests.handlers = [logging.StreamHandler(sys.stderr)]


def _start_metrics(router: Router, args: dict[str, str]) -> Pusher:
    """Metrics, once a previous instance of this model has given back its own.

    Triton gives both the same counters, frees them when the first one is done with them, and does not notice that the
    other goes on writing there.
    """
    registry = TritonRegistry(args["model_name"], args["model_version"])
    may_begin = lambda: not has_predecessor(args["model_instance_name"], args["model_version"])  # noqa: E731
    return Pusher(router.metrics, router.worker_counts, registry, may_begin=may_begin)


def _end_with_triton(pidfd: int) -> None:
    """End this process, and by that the workers, when tritonserver is dead.

    The Python backend does so itself, but only once somebody has reaped tritonserver, and through exit handlers that
    can hang while our threads run.
    """
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()
    os._exit(1)


def _is_serving(name: str, version: str) -> bool:
    """Whether the model is wanted: false once it is being unloaded or the server stops. Not to be asked after a no."""
    try:
        return pb_utils.is_model_ready(model_name=name, model_version=version)
    except pb_utils.TritonModelException:
        # A server that stops has no answer any more, and asked again the Python backend's process crashes.
        return False


def _inbound(request: Any, sender: TritonSender) -> Inbound:
    # The arrays lie in Triton's shared memory only until the request is released.
    arrays = {tensor.name(): np.array(tensor.as_numpy()) for tensor in request.inputs()}
    parameters = _parameters(request)
    return Inbound(
        tensors=arrays,
        parameters=parameters,
        # The generate endpoint of some releases leaves the id among the parameters.
        request_id=request.request_id() or str(parameters.get("id", "")),
        timeout_us=request.timeout(),
        sender=sender,
        arrival_ns=time.time_ns(),
    )


def _settings(config: dict[str, Any]) -> dict[str, str]:
    """What `parameters` of config.pbtxt say."""
    return {key: value["string_value"] for key, value in config.get("parameters", {}).items()}


def _contract(config: dict[str, Any]) -> str:
    """The setting, or its default where it is none: whoever loads the model will say so."""
    contract = _settings(config).get("contract", tensors.VLLM).strip()
    return contract if contract in tensors.BATCH_SIZES else tensors.VLLM


def _parameters(request: Any) -> dict[str, Any]:
    """The request parameters. Raises ValueError naming them."""
    try:
        parameters: dict[str, Any] = load_json(request.parameters() or "{}")
    except ValueError as error:
        raise ValueError(f"'parameters' are not readable ({error})") from None
    return parameters


def _check_instances(config: dict[str, Any]) -> None:
    """One router owns the arena and starts the workers, so a second instance would be a second server."""
    groups = config.get("instance_group", [])
    if len(groups) != 1 or groups[0].get("kind") != "KIND_CPU" or groups[0].get("count", 1) != 1:
        raise ValueError(
            f"instance_group is {json.dumps(groups)}; allowed is [ {{ kind: KIND_CPU, count: 1 }} ]: the one router "
            "runs on the CPU and starts the workers itself, as many as tensor_parallel and data_parallel say"
        )
