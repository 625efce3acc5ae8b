"""A decision works out the signals on its way alone, and decides as with all of them."""

import math
import random
from dataclasses import replace

import pytest
from artifacts import DRAFTING, RULES, SCHEDULES, TREE, make
from tiny import prompts

from treegraft.runtime.decode import Plan, decode
from treegraft.runtime.scheduler import Artifact
from treegraft.runtime.signals import SIGNALS, PlainTree, Reading, State, compute
from treegraft.runtime.size import Cut
from treegraft.runtime.verify import state_of

STATES = [state_of(vector["state"], DRAFTING.width) for vector in make(TREE).vectors]


def test_a_reading_holds_what_compute_gives() -> None:
    dice = random.Random(0)
    for begun in STATES:
        step, mask, lag = dice.randint(1, 3), dice.randint(0, 3), dice.randint(0, 9)
        reading = Reading(begun, step, mask, lag)
        asked = dice.sample(sorted(SIGNALS), 7)
        values = {name: reading[name] for name in asked}
        assert values == compute(asked, replace(begun, step=step, mask=mask, lag=lag))
        assert set(reading) == {*asked, "step", "mask", "lag"}


def test_only_what_the_way_asks_for_is_worked_out() -> None:
    asked = list[int]()

    def match(node: int) -> tuple[int, int]:
        asked.append(node)
        return 0, 0

    tree = PlainTree([-1, 0], [0.0, -0.3], [True, False], [1])
    state = State(tree, 3, 1, 0, 9, 0, 1.0, 1.0, match=match, planned=lambda: pytest.fail("not on the way"))
    RULES.decide(3, 0, Reading(state, 3, 0, 0))
    assert not asked
    RULES.decide(1, 0, Reading(state, 1, 0, 0))
    assert asked == [0]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["mask", "rules", "tree"])
def test_live_decisions_are_those_of_all_signals(pair, schedule) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair("llama")
    decided = list[bool]()

    class Checked(Artifact):
        def decide(self, step, mask, signals):  # type: ignore[no-untyped-def]
            invoke = super().decide(step, mask, signals)
            everything = compute(self.reads, replace(signals.begun, step=step, mask=mask, lag=signals["lag"]))
            assert invoke == super().decide(step, mask, everything)
            decided.append(invoke)
            return invoke

    made = make(schedule)
    artifact = Checked(schedule, made.drafting, made.cut, 0, {})
    for prompt in prompts(4):
        decoded = decode(target, medium, prompt, Plan("checked", artifact, DRAFTING, Cut("none")), 24)
        assert not decoded.fallbacks
        for done in decoded.rounds:
            assert len(done.signals) == len(done.starts) == DRAFTING.depth
            assert all(set(read) <= {*schedule.reads, "step", "mask", "lag"} for read in done.signals)
            assert done.starts[0] == 1 and done.starts == sorted(done.starts) and done.starts[-1] <= done.drafted + 1
    assert len(set(decided)) == 2


def test_what_is_not_finite_matters_where_a_decision_reads_it(recwarn: pytest.WarningsRecorder) -> None:
    # The tree asks for accepted_last at step 1 alone, and for pool_size, which it names before, there not at all.
    tree = replace(TREE, feature=(0, 2, -1, -1, 3, -1, 1, -1, -1), reads=("step", "pool_size", "accepted_last", "lag"))
    artifact = Artifact(tree, DRAFTING.as_dict(), {"kind": "none"}, 0b111, {})
    begun = replace(STATES[0], accepted=[math.nan])
    artifact.decide(3, 0, Reading(begun, 3, 0, 0))
    assert not artifact.fallbacks
    assert artifact.decide(1, 0, Reading(begun, 1, 0, 0))
    assert artifact.fallbacks == 1
    assert [str(w.message) for w in recwarn] == [
        "signal 'accepted_last' is missing or not finite; using the fallback schedule"
    ]


def test_an_uncertainty_that_is_not_finite_means_the_fallback_at_every_step() -> None:
    artifact = Artifact(TREE, DRAFTING.as_dict(), {"kind": "none"}, 0b111, {})
    begun = replace(STATES[0], target_margin=math.nan)
    with pytest.warns(UserWarning, match="'target_margin'"):
        assert all(artifact.decide(step, 0, Reading(begun, step, 0, 0)) for step in (1, 2, 3))
    assert artifact.fallbacks == 3
