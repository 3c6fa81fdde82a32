"""The infer loop: one thread that receives, plans, launches, publishes and samples, step after step."""

from __future__ import annotations

from collections.abc import Callable

from backend_lib.arena import Command, CommandKind, Event, Load, StatusBlock
from backend_lib.request import FinishReason
from backend_lib.worker.agreement import Agreement, EventKind, StepDecision, ended
from backend_lib.worker.crash_points import reach
from backend_lib.worker.logprobs import store
from backend_lib.worker.preparation import Preparation
from backend_lib.worker.publisher import Publisher
from backend_lib.worker.runner import Runner, Step
from backend_lib.worker.scheduler import Plan, Scheduler
from backend_lib.worker.sequence import Sequence


class InferLoop:
    """With `overlap` step N+1 is launched before step N's tokens are known, and N is published while N+1 runs.

    `check`: is given the state after every pass, and raises when it is not as it should be.
    """

    def __init__(
        self, node: Agreement, scheduler: Scheduler, runner: Runner, publisher: Publisher, status: StatusBlock, *,
        preparation: Preparation, read_slot: Callable[[int, int], Sequence], overlap: bool,
        check: Callable[[Scheduler, list[int]], None] | None = None,
    ) -> None:  # fmt: skip
        self._node = node
        self._scheduler = scheduler
        self._runner = runner
        self._publisher = publisher
        self._status = status
        self._preparation = preparation
        self._read_slot = read_slot
        self._overlap = overlap
        self._check = check
        self._newest_ids: list[int] = []  # of the step that was finalized last
        self._previous: Step | None = None
        self._step = 0

    def run_forever(self) -> None:
        while True:
            self.run_once()

    def run_once(self) -> None:
        """One pass. Blocks only while there is nothing to compute, to publish or to apply."""
        self._apply(self._node.receive(block=self._is_idle))
        self._node.announce(busy=not self._is_idle)
        step = self._launch(self._scheduler.plan())
        self._finalize(self._previous)
        if step:
            step.sample()
            reach("sampled")
        if step and not self._overlap:
            self._finalize(step)
            step = None
        self._previous = step
        if self._check:
            self._check(self._scheduler, self._newest_ids)
        self._publisher.flush()
        self._report()

    def _apply(self, decision: StepDecision) -> None:
        for command in decision.commands:
            if command.kind is CommandKind.ADMIT:
                self._admit(command)
            else:
                self._abort(command)
        for event in decision.events:
            if event.kind in (EventKind.PREPARED, EventKind.REFUSED):
                self._admit_prepared(event)
            else:
                self._end(event.slot, event.generation, FinishReason(event.kind - EventKind.ENDED))
        self._node.applied(decision)

    def _admit(self, command: Command) -> None:
        """What fails here concerns one sequence only, and ends only that one."""
        try:
            sequence = self._read_slot(command.slot, command.argument)
            if sequence.grammar is None:
                self._scheduler.add(sequence)
            else:
                self._preparation.begin(sequence)
        except (ValueError, KeyError) as error:
            self._publisher.failed(command.slot, command.generation, f"the request could not be prepared: {error}")

    def _admit_prepared(self, event: Event) -> None:
        """Its grammar is compiled, or cannot be; unless it has been aborted meanwhile."""
        _, slot, generation = event
        taken = self._preparation.take(slot, generation)
        if taken is None:
            return
        sequence, refused = taken
        if event.kind == EventKind.REFUSED:
            self._publisher.failed(slot, generation, *(refused or ()))
            return
        try:
            self._scheduler.add(sequence)
        except ValueError as problem:
            self._publisher.failed(slot, generation, str(problem), FinishReason.INVALID)

    def _abort(self, command: Command) -> None:
        gone = self._preparation.abort(command.slot, command.generation)
        if gone:
            self._publisher.released(gone)
        else:
            self._end(command.slot, command.generation, FinishReason.CANCELLED)

    def _end(self, slot: int, generation: int, finish: FinishReason) -> None:
        gone = self._scheduler.abort(slot, generation, finish)
        if gone:
            self._publisher.released(gone)

    def _launch(self, plan: Plan) -> Step | None:
        for sequence in plan.started:
            self._publisher.started(sequence)
        if not plan.chunks:
            return None
        step = self._runner.launch(plan)
        reach("launched" if plan.chunks[-1].samples else "mid-prefill")
        return step

    def _finalize(self, step: Step | None) -> None:
        """Take the step's tokens. A sequence that ended meanwhile gets none: its row ran one step too far."""
        if step is None:
            return
        results = step.finalize()
        self._newest_ids = results.token_ids
        for sequence, places, records in results.prompt_logprobs:
            store(sequence.prompt_logprobs, places, records)
        for sequence, record in results.logprobs:
            if not sequence.told_finish:
                store(sequence.logprobs, sequence.output_len, record)
        for sequence, token_id in zip(step.sampled, results.token_ids, strict=True):
            if not sequence.finish:
                self._accept(sequence, token_id)
        reach("ids written")
        for sequence in self._scheduler.finalize(step.plan):
            self._publisher.released(sequence)
            reach("freed")

    def _accept(self, sequence: Sequence, token_id: int) -> None:
        goes_on_for_nobody = sequence.grammar_finish
        sequence.accept(token_id)
        if goes_on_for_nobody:
            return
        self._publisher.token(sequence)
        if sequence.grammar_finish and not sequence.finish:
            self._node.tell(ended(sequence.slot, sequence.generation, sequence.grammar_finish))

    @property
    def _is_idle(self) -> bool:
        return self._scheduler.idle and self._previous is None

    def _report(self) -> None:
        scheduler = self._scheduler
        self._step += 1
        self._status.set_load(
            Load(
                step=self._step, running=len(scheduler.running), waiting=len(scheduler.waiting),
                paused=len(scheduler.paused), kv_used=scheduler.memory.num_used,
                cached=scheduler.memory.cache.num_evictable, pauses=scheduler.num_pauses,
                recomputed=scheduler.num_recomputed,
            )
        )  # fmt: skip
