"""The monitor drops drafting that does not pay, and drift is noticed; both by made-up times of real rounds."""

import warnings
from functools import partial

import pytest
from tiny import greedy, prompts, same_text

from treegraft.runtime.decode import AUTOREGRESSIVE, Decoded, Plan, Round, decode, decode_rounds
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.latency import Curve, LatencyProfile
from treegraft.runtime.models import Model
from treegraft.runtime.monitor import PROBES, WINDOW, Monitor, measure_drift, watch_drift
from treegraft.runtime.scheduler import Artifact, Mask
from treegraft.runtime.size import Cut

DRAFTING = Drafting(depth=2, width=2, children=2, budget=6)
PLAN = Plan("medium", Mask(0b11), DRAFTING, Cut("none"))
PROFILE = LatencyProfile(
    Curve((1, 2, 8), (1.0, 1.1, 2.0)), Curve((1, 9), (0.4, 0.7)), medium_step_ms=0.1, medium_first_ms=0.2
)
PROMPT = prompts(4)[3]
TOKENS = 64


def cost(done: Round, call: float, node: float) -> float:
    """A round's time where a one-token step takes 1 ms, each medium call `call` and each verified node `node`."""
    return 1 + call * done.medium_calls + node * done.kept


def watched(models: tuple[Model, Model], plan: Plan, call: float, node: float) -> Decoded:
    steer = Monitor(plan, cost=partial(cost, call=call, node=node))
    *_, decoded = decode_rounds(*models, PROMPT, plan, TOKENS, steer=steer)
    return decoded


def test_where_calls_are_dear_it_drops_to_small_and_the_text_stays(pair) -> None:
    target, medium = pair("llama")
    decoded = watched((target, medium), PLAN, call=5.0, node=0.0)
    assert same_text(target, PROMPT, decoded.tokens, greedy(target, PROMPT, TOKENS))
    (drop,) = decoded.drops
    assert (drop.schedule, drop.one_token_ms) == ("small", 1.0) and drop.ms > 1
    window, probes = decoded.rounds[:WINDOW], decoded.rounds[WINDOW : WINDOW + PROBES]
    assert all(done.mask == 0b11 for done in window)
    assert all((done.drafted, done.medium_calls) == (0, 0) for done in probes)
    after = decoded.rounds[WINDOW + PROBES :]
    assert after[0].position == drop.position
    assert after and all(done.medium_calls == 0 for done in after) and any(done.drafted for done in after)


def test_where_small_loses_too_it_ends_in_one_token_steps(pair) -> None:
    decoded = watched(pair("llama"), PLAN, call=5.0, node=5.0)
    assert [drop.schedule for drop in decoded.drops] == ["small", AUTOREGRESSIVE.name]
    assert all(done.drafted == 0 for done in decoded.rounds if done.position >= decoded.drops[-1].position)


def test_small_itself_drops_to_one_token_steps(pair) -> None:
    decoded = watched(pair("llama"), Plan("small", Mask(0), DRAFTING, Cut("none")), call=0.0, node=5.0)
    assert [drop.schedule for drop in decoded.drops] == [AUTOREGRESSIVE.name]


def test_drafting_that_pays_costs_a_few_one_token_steps_once(pair) -> None:
    decoded = watched(pair("llama"), PLAN, call=0.0, node=0.0)
    assert decoded.drops == []
    assert [i for i, done in enumerate(decoded.rounds) if not done.drafted] == list(range(WINDOW, WINDOW + PROBES))


def test_a_text_shorter_than_a_window_is_left_alone(pair) -> None:
    target, medium = pair("llama")
    *_, decoded = decode_rounds(target, medium, PROMPT, PLAN, WINDOW, steer=Monitor(PLAN, cost=lambda done: 1e9))
    assert decoded.drops == [] and all(done.mask == 0b11 for done in decoded.rounds)


# Drift


def as_profiled(decoded: Decoded, target: float, medium: float) -> Decoded:
    """Rounds with the times that PROFILE expects of them, multiplied."""
    for done in decoded.rounds:
        context, lag, calls = len(PROMPT) + done.position, done.lag, 0.0
        for tokens in done.tokens:
            if tokens:
                calls += float(PROFILE.medium(tokens + lag, context)) + PROFILE.medium_step_ms
                lag = 0
        calls += PROFILE.medium_first_ms if calls else 0.0
        done.ms = {"target": target * float(PROFILE.target(done.kept + 1, context)), "medium": medium * calls}
    return decoded


@pytest.fixture(scope="module")
def learned() -> Plan:
    cut = {"kind": "worth", "rho": 0.5}
    schedule = Artifact(Mask(0b11), DRAFTING.as_dict(), cut, 0, {})
    return Plan("scheduler.json", schedule, DRAFTING, Cut("worth", rho=0.5, profile=PROFILE))


def test_drift_is_measured_over_trees_of_any_size(pair, learned: Plan) -> None:
    decoded = decode(*pair("llama"), PROMPT, learned, 32)
    assert len({done.kept for done in decoded.rounds}) > 1
    for target, medium in ((1.0, 1.0), (3.0, 1.0), (1.0, 4.0)):
        drift = measure_drift(as_profiled(decoded, target, medium), learned, len(PROMPT))
        assert drift == pytest.approx(target / medium)


def test_a_machine_out_of_range_is_warned_of_with_the_command_that_adapts_the_artifact(pair, learned: Plan) -> None:
    decoded = decode(*pair("llama"), PROMPT, learned, 32)
    for target, medium in ((2.0, 1.0), (1.0, 2.0)):
        with pytest.warns(UserWarning, match=r"scheduler\.json .*treegraft profile.*fit-value --log LOG"):
            watch_drift(as_profiled(decoded, target, medium), learned, len(PROMPT))
        assert decoded.drift == pytest.approx(target / medium)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch_drift(as_profiled(decoded, 7.0, 6.0), learned, len(PROMPT))


def test_without_calls_or_a_profile_nothing_is_said_of_drift(pair, learned: Plan) -> None:
    target, medium = pair("llama")
    unprofiled = Plan("learned", learned.schedule, DRAFTING, Cut("none"))
    assert measure_drift(decode(target, medium, PROMPT, unprofiled, 16), unprofiled, len(PROMPT)) is None
    small = Plan("small", Mask(0), DRAFTING, learned.cut)
    assert measure_drift(decode(target, medium, PROMPT, small, 16), small, len(PROMPT)) is None
