"""Damaged and lying checkpoints, and a process of limited memory in which they are opened."""

from __future__ import annotations

import json
import random
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import gguf

SECONDS_PER_CASE = 20.0  # what is refused is refused in milliseconds; this is for a machine that is busy
ROOM_BYTES = 256 << 20  # what opening a file of some kilobytes may take beside what the process has

# The model that stands first on standard input is good, and makes the process take what it needs anyway.
_CHILD = """
import json, re, resource, sys
from pathlib import Path
from backend_lib.checkpoint import open_checkpoint

def load(model):
    checkpoint = open_checkpoint(model)
    if sys.argv[1] == "worker":
        load_decoder(checkpoint, Settings(weights="fp32"))

def tried(model):
    try:
        load(model)
    except BaseException as error:
        return [type(error).__name__, str(error), isinstance(error, OSError) or type(error) is ValueError]
    return ["", "", True]

if sys.argv[1] == "worker":
    import torch
    from backend_lib.config import Settings
    from backend_lib.models import load_decoder
    torch.set_num_threads(1)
load(json.loads(sys.stdin.readline()))
used = 1024 * int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]),) * 2)
for line in sys.stdin:
    print(json.dumps(tried(json.loads(line))), flush=True)
"""


class Outcome(NamedTuple):
    """`error`: its class, "" when the model was opened. `is_allowed`: a plain ValueError, or an OSError."""

    error: str
    text: str
    is_allowed: bool


class Opener:
    """Opens checkpoints in a process of its own, as the router does or as a worker does."""

    def __init__(self, side: str, good_model: Path) -> None:
        argv = [sys.executable, "-c", _CHILD, side, str(ROOM_BYTES)]
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
        )
        self._send(good_model)

    def open(self, model: Path) -> Outcome:
        """Raises AssertionError when the process ends over it, or takes too long."""
        self._send(model)
        assert select.select([self.process.stdout], [], [], SECONDS_PER_CASE)[0], f"{model} takes for ever"
        line = self.process.stdout.readline()
        assert line, f"{model} ended the process with {self.process.wait()}"
        return Outcome(*json.loads(line))

    def _send(self, model: Path) -> None:
        self.process.stdin.write(json.dumps(str(model)) + "\n")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def openers(good_model: Path) -> Iterator[list[Opener]]:
    """One for each side of the process boundary."""
    both = [Opener(side, good_model) for side in ("router", "worker")]
    try:
        yield both
    finally:
        for each in both:
            each.close()


def refusal(openers: list[Opener], model: Path) -> str:
    """What each says of a model that it must refuse."""
    texts = set()
    for side in openers:
        outcome = side.open(model)
        assert outcome.error and outcome.is_allowed, outcome
        texts.add(outcome.text)
    (words,) = texts
    return words


# Mutations.

_NUMBERS = (0, 1, 2, 255, 1 << 16, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 63) - 1)
_WORDS = (*_NUMBERS, 1 << 63, (1 << 64) - 1)
_DEEP: Any = 1
for _ in range(300):
    _DEEP = [_DEEP]
HOSTILE_VALUES: tuple[Any, ...] = (
    *_NUMBERS, None, True, False, -1, -(1 << 63), 3, 5, 7, 10**9, 10**12, 10**400, 0.5, 1.0, 1e-320, 1e308, -1e308,
    float("nan"), float("inf"), -float("inf"), "", "x", "\ud800", "\0", "9" * 1000, [], [[]], {}, {"a": 1}, [None],
    [1, 2], [1e400, "x"], _DEEP, "$A", "llama3", "yarn", "longrope", "linear", "sliding_attention",
)  # fmt: skip


def mutate_bytes(content: bytes, boundaries: list[int], generator: random.Random) -> bytes:
    """One to three changes, most of them where a number, a length or a text begins."""
    changed = bytearray(content)
    for _ in range(generator.choice((1, 1, 2, 3))):
        is_structural = boundaries and generator.random() < 0.7  # a template is text without any
        at = generator.choice(boundaries) if is_structural else generator.randrange(len(content))
        generator.choice(_CHANGES)(changed, at, generator)
    return bytes(changed)


def _flip(content: bytearray, at: int, generator: random.Random) -> None:
    if at < len(content):
        content[at] ^= 1 << generator.randrange(8)


def _overwrite(content: bytearray, at: int, generator: random.Random) -> None:
    size = generator.choice((1, 4, 8))
    content[at : at + size] = (generator.choice(_WORDS) & ((1 << 8 * size) - 1)).to_bytes(size, "little")


def _small_step(content: bytearray, at: int, generator: random.Random) -> None:
    if at < len(content):
        content[at] = (content[at] + generator.choice((-2, -1, 1, 2))) % 256


def _cut(content: bytearray, at: int, generator: random.Random) -> None:
    del content[at:]


def _leave_out(content: bytearray, at: int, generator: random.Random) -> None:
    del content[at : at + generator.choice((1, 4, 8, 100))]


def _repeat(content: bytearray, at: int, generator: random.Random) -> None:
    content[at:at] = content[at : at + generator.choice((1, 4, 8, 100))]


_CHANGES: tuple[Callable[[bytearray, int, random.Random], None], ...] = (
    _flip, _overwrite, _overwrite, _overwrite, _small_step, _cut, _leave_out, _repeat
)  # fmt: skip


def gguf_boundaries(path: Path) -> list[int]:
    """Where the numbers and texts of a file begin: of each key the first few, and of each tensor all."""
    reader = gguf.GGUFReader(path)
    places = [0, 4, 8, 16, reader.data_offset]
    for field in [*reader.fields.values(), *(tensor.field for tensor in reader.tensors)]:
        at = field.offset
        for part in field.parts[:8]:
            places.append(at)
            at += part.nbytes
    return places


def mutate_json(text: str, generator: random.Random) -> bytes:
    """A value of another kind or size somewhere, a key gone, or broken text."""
    if generator.random() < 0.2:
        return mutate_bytes(text.encode(), [0, len(text) // 2, len(text) - 1], generator)
    document = json.loads(text)
    for _ in range(generator.choice((1, 1, 2, 3))):
        _mutate_value(document, generator)
    return json.dumps(document).encode()


def _mutate_value(document: Any, generator: random.Random) -> None:
    while isinstance(document, dict | list) and document:
        key = generator.choice(list(document)) if isinstance(document, dict) else generator.randrange(len(document))
        inner = document[key]
        if not isinstance(inner, dict | list) or not inner or generator.random() < 0.3:
            document[key] = generator.choice(HOSTILE_VALUES)
            if isinstance(document, dict) and generator.random() < 0.2:
                del document[key]
            return
        document = inner


def mutate_safetensors(content: bytes, generator: random.Random) -> bytes:
    """A lie in the header, its length made to fit again; or other bytes."""
    header_end = 8 + int.from_bytes(content[:8], "little")
    if generator.random() < 0.3:
        return mutate_bytes(content, [*range(12), header_end, len(content) - 1], generator)
    header = mutate_json(content[8:header_end].decode(), generator)
    length = generator.choice((len(header),) * 9 + _WORDS)
    return length.to_bytes(8, "little") + header + content[header_end:]


def mutate_file(path: Path, boundaries: list[int], generator: random.Random) -> bytes:
    content = path.read_bytes()
    if path.suffix == ".json":
        return mutate_json(content.decode(), generator)
    if path.suffix == ".safetensors":
        return mutate_safetensors(content, generator)
    return mutate_bytes(content, boundaries, generator)
