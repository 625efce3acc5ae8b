"""Refinement on the replay: wrong thresholds and leaves are mended, good ones are left alone."""

import numpy as np
import pytest
from log_fixture import PLANTED, PLANTED_PROFILE, planted_log

from treegraft.distill.refine import refine
from treegraft.runtime.scheduler import Rule, Rules, TreeModel
from treegraft.runtime.size import Cut
from treegraft.value_system.replay import NAMES, decide_many, flatten, leaf_of, replay
from treegraft.value_system.value import features, states_of

BEST = Rules((Rule(1, (("root_match", ">", 2.0),)),), ("root_match",))
CUT = Cut("worth", 0.9, PLANTED_PROFILE)
# Calls at step 1 where root_match <= 2: the wrong way round.
WRONG = TreeModel((0, 1, -1, -1, -1), (1.5, 2.0, 0.0, 0.0, 0.0), (1, 2, -1, -1, -1), (4, 3, -1, -1, -1),
                  (0.0, 0.0, 0.3, -0.2, -0.1), ("step", "root_match"))  # fmt: skip


@pytest.fixture(scope="module")
def log():  # type: ignore[no-untyped-def]
    return flatten(planted_log(0, prompts=8))


def refined(student, log):  # type: ignore[no-untyped-def]
    states = states_of(log, replay(log, student, CUT, PLANTED_PROFILE, PLANTED))
    return refine(student, [features(log, states, step) for step in (1, 2)], log, CUT, PLANTED_PROFILE, PLANTED)


def test_a_threshold_moves_to_where_calls_begin_to_pay(log) -> None:
    always = Rules((Rule(1, (("root_match", ">", 0.5),)),), ("root_match",))
    assert refined(always, log) == BEST


def test_a_rule_that_never_pays_and_a_condition_that_says_nothing_go(log) -> None:
    wordy = Rules(
        (Rule(1, (("root_match", ">", 2.0), ("match_mean", ">", 0.5))), Rule(2, (("tree_size", ">", 1.0),))),
        ("root_match", "match_mean", "tree_size"),
    )
    assert refined(wordy, log) == BEST


def test_what_is_best_is_left_alone(log) -> None:
    assert refined(BEST, log) == BEST


def test_leaves_that_decide_wrongly_are_turned_over(log) -> None:
    tree = refined(WRONG, log)
    assert tree.value == (0.0, 0.0, -0.3, 0.2, -0.1)
    speeds = [replay(log, student, CUT, PLANTED_PROFILE, PLANTED).rho for student in (tree, BEST, WRONG)]
    assert speeds[0] == speeds[1] > speeds[2]


def test_many_decisions_are_those_made_one_by_one(log) -> None:
    generator = np.random.default_rng(0)
    values = generator.integers(0, 4, (200, len(NAMES))).astype(float)
    masks = np.zeros(200, dtype=int)
    for schedule in (BEST, WRONG, Rules((Rule(2, ()),), ())):
        for step in (1, 2):
            one_by_one = [schedule.decide(step, 0, dict(zip(NAMES, row))) for row in values.tolist()]
            assert decide_many(schedule, step, masks, values).tolist() == one_by_one
    assert [WRONG.value[leaf] for leaf in leaf_of(WRONG, values)] == [
        WRONG.margin(dict(zip(NAMES, row))) for row in values.tolist()
    ]
