"""The built-in model under kills: the tool's short form, and that it would tell a wrong token from a near tie."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backend_lib.checkpoint import open_checkpoint
from backend_lib.models.hash_model import HashModel
from benchmarks.faults.margins import BOUND, compare, first_difference, next_scores
from benchmarks.faults.requests import Question, Round
from tests.support.checkpoints import hash_text
from tests.support.engine import expected_ids, running_router

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_streams_of_the_built_in_model_keep_their_tokens(tmp_path) -> None:
    figures = tmp_path / "kills.json"
    command = [sys.executable, "benchmarks/kills.py", "--kills", "8", "--prompts", "16", "--json", figures]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads(figures.read_text())
    assert found["kills"] >= 8 and found["requests"] >= 16 and found["tokens"] > 1000
    assert found["stalls"] and not found["lost"]
    assert all(each["margin"] < BOUND for each in found["differences"])


def test_where_two_answers_part() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [5]) == 0


class Twins:
    """A decoder of two tokens whose scores, 0.0005 apart, are a near tie, and of others that are far below."""

    vocab_size = 8

    def allocate_kv(self, num_tokens: int) -> torch.Tensor:
        return torch.zeros(num_tokens + 1)

    def forward(self, batch, kv) -> torch.Tensor:
        logits = torch.zeros(len(batch.logits_index), self.vocab_size)
        logits[:, 3], logits[:, 4] = 5.0, 5.0005
        return logits


def test_a_near_tie_is_told_from_a_wrong_token() -> None:
    question = Question("", 4, 0.0, 0)
    assert compare(Twins(), 0, question, [1], [4, 4, 4], [4, 4, 4]) is None
    tie = compare(Twins(), 0, question, [1], [4, 4, 4], [4, 3, 7])
    assert (tie.position, tie.expected, tie.got, tie.is_wrong) == (1, 4, 3, False)
    wrong = compare(Twins(), 0, question, [1], [4, 4, 4], [4, 4, 7])
    assert (wrong.position, wrong.is_wrong) == (2, True) and abs(wrong.margin - 5.0005) < 1e-3
    assert compare(Twins(), 0, question, [1], [4, 4, 4], [4, 4]).is_wrong


def test_the_best_score_is_the_token_that_the_worker_chose(tmp_path) -> None:
    """Greedy or drawn, at every position of what a real worker has published, ids and all."""
    folder, text = tmp_path / "hash", hash_text([5, 6, 7])
    questions = [Question(text, 20, temperature, seed) for temperature, seed in ((0.0, 1), (4.0, 2), (4.0, 3))]
    with running_router(folder) as router:
        asked = Round(router, questions)
        for each in asked.running:
            each.sender.wait()
        answers = asked.token_ids()
    decoder = HashModel(open_checkpoint(str(folder)).config)
    for question, (prompt, ids) in zip(questions, answers, strict=True):
        assert prompt == [5, 6, 7]
        assert ids == list(expected_ids(prompt, 20, temperature=question.temperature, seed=question.seed))
        best = [int(next_scores(decoder, question, [*prompt, *ids[:at]]).argmax()) for at in range(20)]
        assert best == ids
