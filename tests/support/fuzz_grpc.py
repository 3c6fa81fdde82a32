"""Hostile gRPC calls made of raw messages, and a client that counts the endings of each call's requests."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import grpc
from tritonclient.grpc import service_pb2

from tests.support.fuzz import BOUND, Draw, Outcome
from tests.support.hashing import VOCAB

Message = service_pb2.ModelInferRequest
SHAPES = ((), (0,), (1,), (2,), (1, 1), (-1,), (1 << 31,), (1 << 62, 4), (0, 1 << 62), (65,), (1,) * 20)
DATATYPES = ("BYTES", "BOOL", "INT32", "UINT64", "FP32", "FP64", "INT8", "BF16", "", "bytes", "NONSENSE")
_Fault = Callable[[Draw, Message], None]
_NUMBERS = {
    "TYPE_INT32": ("i", (0, 1, VOCAB - 1, VOCAB, -1, (1 << 31) - 1, -(1 << 31))),
    "TYPE_UINT64": ("Q", (0, 1, (1 << 64) - 1)),
    "TYPE_FP32": ("f", (0.0, 0.5, 1.0, -1.0, 1e-40, 3e38, float("nan"), float("inf"))),
}
_PROMPTS = ("text_input", "input_ids", "messages")
_SERVICE = "/inference.GRPCInferenceService/"


@dataclass(frozen=True)
class GrpcCase:
    """Messages for one call. `is_proper`: all of them can be decoded, so each of them has an ending of its own."""

    messages: tuple[bytes, ...]
    streams: bool = True
    cancel_after: float | None = None
    is_proper: bool = True

    def send(self, channel: grpc.Channel) -> Outcome:
        try:
            return self._stream(channel) if self.streams else self._infer(channel)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.CANCELLED and self.cancel_after is not None:
                return Outcome("left")
            assert not (self.streams and self.is_proper), error
            assert error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED, error
            return Outcome("error", error.details())

    def _infer(self, channel: grpc.Channel) -> Outcome:
        call = channel.unary_unary(_SERVICE + "ModelInfer")
        call(self.messages[0], timeout=BOUND)
        return Outcome("answer")

    def _stream(self, channel: grpc.Channel) -> Outcome:
        call = channel.stream_stream(
            _SERVICE + "ModelStreamInfer", response_deserializer=service_pb2.ModelStreamInferResponse.FromString
        )(iter(self.messages), timeout=BOUND)
        if self.cancel_after is not None:
            threading.Timer(self.cancel_after, call.cancel).start()
        words = [response.error_message for response in call if _is_ending(response)]
        assert len(words) == len(self.messages) or not self.is_proper, words
        errors = [each for each in words if each]
        return Outcome("error", "\n".join(errors)) if errors else Outcome("answer")


def _is_ending(response: service_pb2.ModelStreamInferResponse) -> bool:
    return bool(response.error_message) or response.infer_response.parameters["triton_final_response"].bool_param


def grpc_case(draw: Draw, inputs: Mapping[str, str], shape: Sequence[int] = (1,)) -> GrpcCase:
    """A call of one request or several. `inputs`: Triton's data type by name, such as TYPE_BOOL. `shape`: of tensors
    that are right."""
    count = draw.choice((1, 1, 1, 2, 5))
    # An unknown model in a call with others makes tritonserver 24.10 end itself, so it is asked for alone.
    faults = (*_FAULTS, _model) if count == 1 else _FAULTS
    messages = [_message(draw, inputs, faults, shape).SerializeToString() for _ in range(count)]
    is_proper = not draw.likely(0.04)
    if not is_proper:
        cut = draw.randrange(len(messages[-1]))
        messages[-1] = draw.choice((messages[-1][:cut], draw.randbytes(50), messages[-1][:cut] + b"\xff" * 9))
    cancel_after = draw.random() * 0.1 if draw.likely(0.15) else None
    return GrpcCase(tuple(messages), draw.likely(0.9), cancel_after, is_proper)


def _message(draw: Draw, inputs: Mapping[str, str], faults: Sequence[_Fault], shape: Sequence[int]) -> Message:
    message = Message(model_name="llm", id=draw.choice(("", "1", "the same", "é\x00", "x" * 5000)))
    prompt = draw.choice(_PROMPTS) if draw.likely(0.3) else _PROMPTS[0]
    _add_input(message, prompt, _content(draw, prompt, inputs[prompt]), inputs[prompt].removeprefix("TYPE_"))
    others = [name for name in inputs if name not in _PROMPTS or draw.likely(0.1)]
    for name in draw.sample(sorted(others), draw.randrange(4)):
        if name != prompt:
            _add_input(message, name, _content(draw, name, inputs[name]), inputs[name].removeprefix("TYPE_"))
    for tensor in message.inputs:
        tensor.shape.extend(shape)
    for name, value in draw.fields() if draw.likely(0.6) else ():
        _set_parameter(draw, message.parameters, name, value)
    if draw.likely(0.1):
        _set_parameter(draw, message.parameters, draw.choice(("timeout", "priority", "sequence_id")), draw.any_value())
    message.parameters["triton_enable_empty_final_response"].bool_param = draw.likely(0.5)
    if draw.likely(0.35):
        draw.choice(faults)(draw, message)
    return message


def _add_input(message: Message, name: str, content: bytes, datatype: str) -> None:
    message.inputs.add(name=name, datatype="BYTES" if datatype == "STRING" else datatype)
    message.raw_input_contents.append(content)


def _content(draw: Draw, name: str, kind: str) -> bytes:
    if kind == "TYPE_BOOL":
        return bytes([draw.choice((0, 1)) if draw.likely(0.9) else 255])
    if kind in _NUMBERS:
        letter, numbers = _NUMBERS[kind]
        return struct.pack(f"<{letter}", draw.choice(numbers))
    if name == "messages":
        return _packed(draw.encoded(draw.messages()))
    return _packed(draw.encoded(draw.sampling_text() if name == "sampling_parameters" else draw.prompt()))


def _packed(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text


def _set_parameter(draw: Draw, parameters, name: str, value: object) -> None:
    """As what it is, as text, or as another type; names and texts that no protobuf holds are left out."""
    try:
        parameter = parameters[name]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, float) and draw.likely(0.8):
            parameter.double_param = value
        elif isinstance(value, int) and -(1 << 63) <= value < 1 << 63 and draw.likely(0.8):
            parameter.int64_param = value
        elif isinstance(value, int) and 0 <= value < 1 << 64:
            parameter.uint64_param = value
        elif value is not None and not isinstance(value, int | list):
            parameter.string_param = str(value)
    except ValueError:
        if name.isascii():
            parameters.pop(name, None)


# What is wrong with a message, each in one place of it.


def _wrong_shape(draw: Draw, message: Message) -> None:
    tensor = draw.choice(message.inputs)
    del tensor.shape[:]
    tensor.shape.extend(draw.choice(SHAPES))


def _wrong_type(draw: Draw, message: Message) -> None:
    draw.choice(message.inputs).datatype = draw.choice(DATATYPES)


def _wrong_content(draw: Draw, message: Message) -> None:
    """Bytes of another length than they say: the length stands in the first four."""
    place = draw.randrange(len(message.raw_input_contents))
    content = message.raw_input_contents[place]
    message.raw_input_contents[place] = draw.choice(
        (
            b"",
            content[:2],
            content[:-1],
            content + b"x",
            content + content,
            b"\xff" * 4 + content,
            b"\0" * 4,
            b"\xff" * 8,
        )
    )


def _contents_missing(draw: Draw, message: Message) -> None:
    del message.raw_input_contents[draw.randrange(len(message.raw_input_contents)) :]


def _contents_more(draw: Draw, message: Message) -> None:
    message.raw_input_contents.append(draw.choice((b"", b"\1", _packed(b"x"))))


def _typed(draw: Draw, message: Message) -> None:
    """Typed contents, beside the raw ones or in their place, of the right type or another."""
    if draw.likely(0.8):
        del message.raw_input_contents[:]
    for tensor in message.inputs:
        contents = tensor.contents
        if tensor.datatype == "BOOL":
            contents.bool_contents.extend([True] * draw.choice((0, 1, 1, 1, 2)))
        else:
            contents.bytes_contents.extend([b"\x84x"] * draw.choice((0, 1, 1, 1, 2)))
        if draw.likely(0.2):
            contents.int64_contents.append(5)


def _input_missing(draw: Draw, message: Message) -> None:
    place = draw.randrange(len(message.inputs))
    del message.inputs[place], message.raw_input_contents[place]


def _input_twice(draw: Draw, message: Message) -> None:
    place = draw.randrange(len(message.inputs))
    message.inputs.add().CopyFrom(message.inputs[place])
    message.raw_input_contents.append(message.raw_input_contents[place])


def _input_unknown(draw: Draw, message: Message) -> None:
    _add_input(message, draw.choice(("", "max_tokens", "TEXT_INPUT", "x" * 5000, "é\x00")), b"\1", "BOOL")


def _outputs(draw: Draw, message: Message) -> None:
    for _ in range(draw.choice((1, 2, 300))):
        message.outputs.add(name=draw.choice(("text_output", "finish_reason", "nothing", "", "\x00")))


def _shared_memory(draw: Draw, message: Message) -> None:
    tensor = draw.choice(message.inputs) if draw.likely(0.7) else message.outputs.add(name="text_output")
    tensor.parameters["shared_memory_region"].string_param = draw.choice(("no such region", "", "x" * 5000))
    tensor.parameters["shared_memory_byte_size"].int64_param = draw.choice((0, 1, -1, 1 << 62))
    tensor.parameters["shared_memory_offset"].int64_param = draw.choice((0, -1, 1 << 62))


def _tensor_parameters(draw: Draw, message: Message) -> None:
    for name in ("binary_data", "classification", draw.name()):
        _set_parameter(draw, draw.choice(message.inputs).parameters, name, draw.any_value())


def _model(draw: Draw, message: Message) -> None:
    message.model_name = draw.choice(("", "none", "llm", "../llm", "x" * 5000))
    message.model_version = draw.choice(("", "1", "2", "-1", "x", "9" * 50))


def _reserved_parameters(draw: Draw, message: Message) -> None:
    for name in ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "triton_odd", "binary_data"):
        _set_parameter(draw, message.parameters, name, draw.any_value())


_FAULTS: tuple[_Fault, ...] = (
    _wrong_shape, _wrong_type, _wrong_content, _contents_missing, _contents_more, _typed, _input_missing, _input_twice,
    _input_unknown, _outputs, _shared_memory, _tensor_parameters, _reserved_parameters,
)  # fmt: skip
