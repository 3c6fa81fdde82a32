"""Which group computes a request, and what becomes of it when that group cannot."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from backend_lib.arena import Published, SlotTable
from backend_lib.arena.ring import RingFull
from backend_lib.router.group import Group
from backend_lib.router.prefix_map import BLOCK, PrefixMap, block_keys
from backend_lib.router.stream import Stream

log = logging.getLogger("tandem")

# Of max_running: by so much a group may have more sequences than the least loaded one and still be sent those whose
# beginning it has. A batch larger by a quarter takes hardly longer a step; a prompt that is not computed saves many.
OVERLOAD = 0.25


class Dispatch:
    """Gives each request to one group, all its sequences to the same.

    It is the group with the longest cached beginning of the prompt among those that are up and not overloaded; of equal
    ones the least loaded, and then the one that was chosen longest ago. The field `dp_rank` overrides that.

    `_lock` guards the choice: the maps and `_chosen`. It is never held while a group's lock is taken.
    """

    def __init__(
        self, groups: Sequence[Group], slots: SlotTable, *, max_running: int, can_start: Callable[[int], bool]
    ) -> None:
        """`can_start`: whether the last start of a group's workers did not fail."""
        self._groups = groups
        self._slots = slots
        self._slack = max(1, int(OVERLOAD * max_running))
        self._can_start = can_start
        self._lock = threading.Lock()
        self._maps = [PrefixMap(0) for _ in groups]
        self._chosen = [0] * len(groups)  # when each was last chosen
        self._choices = itertools.count(1)
        self._arrivals = itertools.count(1)

    def set_kv_tokens(self, group: int, tokens: int) -> None:
        """What a group's KV cache holds: a map of more blocks would tell of what has been evicted."""
        with self._lock:
            self._maps[group].max_blocks = tokens // BLOCK

    def forget(self, group: int) -> None:
        """Its workers, and with them their prefix cache, are gone."""
        with self._lock:
            self._maps[group].clear()

    def assign(self, streams: Sequence[Stream]) -> None:
        """Choose the group of a request's sequences, before anybody else knows of them."""
        group = self._choose(streams[0])
        for stream in streams:
            stream.group = group
            stream.arrival = next(self._arrivals)

    def submit(self, stream: Stream) -> None:
        """Queue a stream with its group. Raises RingFull."""
        group = self._groups[stream.group]
        group.submit(stream)
        if not group.is_up:  # it may have gone down since it was chosen: who took its queue then did not see this one
            self.move_from(group)

    def abort(self, stream: Stream) -> None:
        """The stream has a verdict."""
        while not self._groups[stream.group].abort(stream):
            pass  # it has just gone to another group

    def touched(self, stream: Stream, published: Published) -> None:
        """A worker has said something of the stream."""
        self._groups[stream.group].touched(stream, published)

    def move_from_all(self) -> None:
        """A group has come up."""
        for group in self._groups:
            self.move_from(group)

    def move_from(self, group: Group) -> None:
        """Give what a group that is down need not compute itself to those that are up.

        That is what waits there; what its workers had been given as well, once a start of the next ones has failed.
        """
        if group.is_up or not any(each.is_up for each in self._groups):
            return
        streams = group.movable(given=not self._can_start(group.index))
        for _, request in itertools.groupby(streams, key=lambda each: id(each.request)):
            self._move(group, list(request))

    def _move(self, group: Group, streams: list[Stream]) -> None:
        to = self._choose(streams[0])
        for stream in streams:
            if to == group.index or not group.let_go(stream, to):
                continue
            try:
                self.submit(stream)
            except RingFull:  # it waits there
                log.exception("a request that went to another group could not be posted")

    def _choose(self, stream: Stream) -> int:
        if len(self._groups) == 1:
            return 0
        request = stream.request
        keys = [] if request.disable_prompt_cache else block_keys(self._slots.prompt_ids(stream.slot))
        with self._lock:
            group = self._best(keys) if request.dp_rank is None else request.dp_rank
            self._maps[group].add(keys)
            self._chosen[group] = next(self._choices)
        return group

    def _best(self, keys: Sequence[int]) -> int:
        loads = {group.index: group.num_streams for group in self._able()}
        most = min(loads.values()) + self._slack
        free = [index for index, load in loads.items() if load <= most]
        return max(free, key=lambda index: (self._maps[index].matched(keys), -loads[index], -self._chosen[index]))

    def _able(self) -> Iterable[Group]:
        """Those that are up; else those that soon will be; else all."""
        return (
            [group for group in self._groups if group.is_up]
            or [group for group in self._groups if self._can_start(group.index)]
            or self._groups
        )
