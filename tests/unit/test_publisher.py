"""What a worker makes visible, in the order in which the router may rely on it."""

from __future__ import annotations

import numpy as np
import pytest

from backend_lib.arena import Doorbell, Published, SlotRef
from backend_lib.request import FinishReason
from backend_lib.worker.publisher import Publisher
from backend_lib.worker.sequence import Sequence
from tests.support.arena import close, new_arena


class Watched:
    """A publisher whose every outward act is noted, with what a reader of the slot would see at that moment."""

    def __init__(self) -> None:
        self.arena = new_arena(num_groups=1, num_ranks=1, dirty_records=16)
        self.slots, self.dirty, self.bell = self.arena.slots, self.arena.dirty_list(0), Doorbell()
        self.acts: list[tuple[str, object]] = []
        self.publisher = Publisher(self, self, self)
        self.headers = self.slots.headers

    def publish(self, slot: int, generation: int, output_len: int, finish: FinishReason, *, released: bool) -> None:
        self.acts.append(("word", self.slots.output_ids(slot)[:output_len].tolist()))
        self.slots.publish(slot, generation, output_len, finish, released=released)

    def append(self, refs: list[SlotRef]) -> None:
        self.acts.append(("dirty", [self.slots.published(*ref) for ref in refs]))
        self.dirty.append(refs)

    def ring(self) -> None:
        self.acts.append(("bell", self.dirty.drain()))
        self.bell.ring()

    def sequence(self, slot: int) -> Sequence:
        self.slots.write(slot, {"generation": 3, "output_offset": 256 * slot, "max_tokens": 4})
        return Sequence(
            slot=slot, generation=3, prompt_ids=np.zeros(1, np.int32), output_ids=self.slots.output_ids(slot),
            max_tokens=4, eos_token_ids=frozenset({1}),
        )  # fmt: skip


@pytest.fixture
def it():
    watched = Watched()
    yield watched
    close(watched.arena)
    watched.bell.close()


def test_ids_then_word_then_dirty_list_then_bell_once_a_step(it) -> None:
    first, second = it.sequence(0), it.sequence(1)
    for sequence, token in ((first, 7), (second, 8)):
        sequence.accept(token)
        it.publisher.token(sequence)
    assert it.acts == []
    it.publisher.flush()
    words = [Published(1, FinishReason.NONE, False)] * 2
    assert it.acts == [("word", [7]), ("word", [8]), ("dirty", words), ("bell", [SlotRef(0, 3), SlotRef(1, 3)])]
    it.publisher.flush()
    assert len(it.acts) == 4  # nothing new, nobody woken


def test_a_token_and_its_release_in_one_step_are_one_word(it) -> None:
    sequence = it.sequence(0)
    sequence.accept(1)
    it.publisher.token(sequence)
    it.publisher.released(sequence)
    it.publisher.flush()
    assert it.acts[1] == ("dirty", [Published(1, FinishReason.EOS, True)])


def test_an_end_is_told_before_the_release(it) -> None:
    sequence = it.sequence(0)
    sequence.accept(1)
    it.publisher.token(sequence)
    it.publisher.flush()
    assert it.slots.published(0, 3) == Published(1, FinishReason.EOS, False)
    it.publisher.released(sequence)
    it.publisher.flush()
    assert it.slots.published(0, 3) == Published(1, FinishReason.EOS, True)


def test_times_are_stamped_once(it) -> None:
    sequence = it.sequence(0)
    it.publisher.started(sequence)
    stamps = []
    for token in (7, 8, 1):
        sequence.accept(token)
        it.publisher.token(sequence)
        stamps.append(tuple(int(it.headers[name][0]) for name in ("first_token_ns", "last_token_ns")))
    scheduled = int(it.headers["first_scheduled_ns"][0])
    assert 0 < scheduled <= stamps[0][0] == stamps[2][0] <= stamps[2][1]
    assert stamps[0][1] == stamps[1][1] == 0


def test_a_pause_does_not_move_when_a_sequence_began_but_a_new_worker_does(it) -> None:
    sequence = it.sequence(0)
    stamps = []
    for begin in (lambda: None, sequence.rewind, lambda: setattr(sequence, "num_pauses", 0)):
        begin()
        it.publisher.started(sequence)
        stamps.append(int(it.headers["first_scheduled_ns"][0]))
    assert stamps[0] == stamps[1] < stamps[2]


def test_one_that_could_not_be_prepared_is_over_with_words(it) -> None:
    it.sequence(0)
    it.publisher.failed(0, 3, "x" * 300)
    assert it.headers["error"][0] == b"x" * 200
    assert it.acts[-2:] == [("dirty", [Published(0, FinishReason.ERROR, True)]), ("bell", [SlotRef(0, 3)])]
