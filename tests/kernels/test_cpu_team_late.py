"""A thread that was kept from its core and comes to a step that is over, whose words have changed meanwhile."""

from __future__ import annotations

import numpy as np

from kernels.cpu import operations, program
from kernels.cpu.team import Team, _work

GROUPS, TOKENS = 2, 8
FIRST_GENERATION = 1


def test_a_late_thread_does_nothing_to_a_step_that_is_over():
    team = Team(1)
    x = np.ones((TOKENS, GROUPS * 32), np.float32)
    codes, scales = np.zeros(x.shape, np.int8), np.zeros((TOKENS, GROUPS, 2), np.float32)
    table = operations.table([operations.quantise(x, GROUPS, codes, scales)])
    step = np.zeros(program.STEP_WORDS, np.int64)
    step[program.TOKENS] = TOKENS // 2
    team.run(table, step)
    assert codes[: TOKENS // 2].all() and not codes[TOKENS // 2 :].any()

    step[program.TOKENS] = TOKENS  # the caller prepares its next step
    _work(team._block, FIRST_GENERATION, 1, 2)
    assert not codes[TOKENS // 2 :].any()

    team.run(table, step)
    assert codes.all()
    team.close()
