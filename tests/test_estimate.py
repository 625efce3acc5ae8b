"""Logs of some positions: an exact replay is refused, an estimate comes close."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from log_fixture import PLANTED, PLANTED_PROFILE, planted_log, random_answer

from treegraft.data.log import Answer, LogError
from treegraft.runtime.scheduler import Mask
from treegraft.runtime.size import Cut
from treegraft.value_system.estimate import FACTS, stand_in
from treegraft.value_system.replay import replay

WORTH = Cut("worth", 0.5, PLANTED_PROFILE)


def some_positions(answer: Answer, which: Sequence[int]) -> Answer:
    index = np.array(which, dtype=int)
    return replace(answer, positions=index, **{name: getattr(answer, name)[index] for name in FACTS})


def test_a_log_of_some_positions_is_estimated_close_to_the_exact_replay() -> None:
    answers = planted_log(8, prompts=40, length=40)
    exact = replay(answers, Mask(1), WORTH, PLANTED_PROFILE, PLANTED)
    sampled = [some_positions(answer, range(0, 39, 4)) for answer in answers]
    with pytest.raises(LogError, match="10 of 39 positions are logged; an exact replay needs them all"):
        replay(sampled, Mask(1), WORTH, PLANTED_PROFILE, PLANTED)
    estimate = replay(stand_in(sampled), Mask(1), WORTH, PLANTED_PROFILE, PLANTED)
    assert estimate.rho == pytest.approx(exact.rho, rel=0.1) and estimate.rho != exact.rho
    again = replay(stand_in(answers), Mask(1), WORTH, PLANTED_PROFILE, PLANTED)
    assert again.ms.tolist() == exact.ms.tolist()


def test_a_position_left_out_has_the_facts_of_one_that_is_near() -> None:
    answer = random_answer(np.random.default_rng(9), 30)
    logged = [1, 4, 8, 9, 13, 20, 26]
    filled = stand_in([some_positions(answer, logged)])[0]
    assert filled.positions.tolist() == list(range(29))
    for position in range(29):
        (source,) = [p for p in range(29) if np.array_equal(filled.signals[position], answer.signals[p])]
        between = [p for p in logged if min(source, position) < p < max(source, position)]
        assert source == position if position in logged else len(between) < 4
        np.testing.assert_array_equal(filled.ranks[position], answer.ranks[source])


def test_an_answer_of_which_nothing_is_logged_is_left_out() -> None:
    answer = random_answer(np.random.default_rng(9), 10)
    assert len(stand_in([answer, some_positions(answer, [])])) == 1
    with pytest.raises(LogError, match="no position of any answer"):
        stand_in([some_positions(answer, [])])
