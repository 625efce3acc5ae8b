"""Replay against a plain loop, against live decoding, and the oracle against exhaustive search."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from log_fixture import COSTLY, make_pair, random_answer, random_log
from tiny import prompts

from treegraft.collect.collector import Sampling, collect
from treegraft.data.log import Answer, LogError, node, read_log
from treegraft.data.prompts import Prompt
from treegraft.runtime.decode import AUTOREGRESSIVE, Plan, decode
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.latency import LatencyProfile
from treegraft.runtime.scheduler import Mask, Rule, Rules
from treegraft.runtime.signals import LOGGED, SIGNALS
from treegraft.runtime.size import Cut
from treegraft.value_system.gains import evaluate
from treegraft.value_system.replay import (
    TRAJECTORY,
    Record,
    best_mask,
    fixed_point,
    oracle,
    replay,
    summarise,
)

DRAFTING = Drafting(depth=3, budget=6)
WORTH = Cut("worth", 0.05, COSTLY)
CUTS = {"worth": WORTH, "none": Cut("none"), "score": Cut("score", log_s=-1.5)}
# Reads logged and trajectory signals at every step; the thresholds are values that no signal takes.
PICKY = Rules(
    (
        Rule(1, (("lag", ">", 3.5), ("accepted_mean4", "<=", 1.1))),
        Rule(1, (("accepted_last", ">", 0.5), ("target_entropy", "<=", 1.7321))),
        Rule(2, (("lag", "<=", 0.5), ("pre_reselect_score", ">", -3.1234))),
        Rule(2, (("answer_position", ">", 5.5), ("match_mean", "<=", 2.0123))),
        Rule(3, (("accepted_mean4", ">", 0.4), ("expected_accepted", "<=", 1.5678))),
        Rule(3, (("medium_calls", ">", 0.5), ("lag", "<=", 0.5), ("tree_size", ">", 6.5))),
    ),
    ("lag", "accepted_mean4", "accepted_last", "target_entropy", "pre_reselect_score", "answer_position", "match_mean",
     "expected_accepted", "medium_calls", "tree_size"),
)  # fmt: skip
# Decides by what is known anyway at steps 1 and 2, and by a signal at step 3 alone.
SPARE = Rules(
    (Rule(1, (("lag", "<=", 4.5), ("step", "<=", 1.5))), Rule(2, (("mask", ">", 0.5),)),
     Rule(3, (("mask", "<=", 0.5), ("match_mean", "<=", 2.0123)))),
    ("lag", "step", "mask", "match_mean"),
)  # fmt: skip


def by_hand(answer: Answer, schedule, cut: Cut, profile: LatencyProfile, depth: int) -> list[dict]:
    """The rounds of one answer, one at a time, by the words of the specification."""
    rounds, position, lag, history = [], 0, answer.prompt_length, []
    while position < answer.length - 1:
        context, mask, caught_up = answer.prompt_length + position, 0, False
        for step in range(1, depth + 1):
            signals = dict(zip(LOGGED, answer.signals[position, node(step, mask)]))
            last = history[-4:]
            signals |= {"lag": 0 if caught_up else lag, "accepted_last": history[-1] if history else 0,
                        "accepted_mean4": sum(last) / len(last) if last else 0.0}  # fmt: skip
            if schedule.decide(step, mask, signals):
                mask |= 1 << (step - 1)
            caught_up = caught_up or answer.tokens[position, mask, step - 1] > 0
        scores = [float(s) for s in answer.log_s[position, mask] if s > -np.inf]
        kept = cut.size(scores, context)
        accepted = sum(rank < kept for rank in answer.ranks[position, mask])
        ms = float(profile.target(kept + 1, context)) + profile.round_ms
        owed = lag
        for step in range(depth):
            ms += profile.medium_step_ms if mask >> step & 1 else profile.small_step_ms
            if count := answer.tokens[position, mask, step]:
                ms += float(profile.medium(owed + count, context))
                owed = 0
        ms += profile.medium_first_ms if answer.tokens[position, mask].any() else 0
        rules = schedule.rules if isinstance(schedule, Rules) else ()
        asking = {rule.step for rule in rules for name, *_ in rule.conditions if name not in ("step", "mask", "lag")}
        ms += len(asking) * profile.decision_ms
        ms += profile.uncertainty_ms if {"target_entropy", "target_margin"} & set(schedule.reads) else 0
        ended = position + accepted == answer.length - 1
        rounds.append({"position": position, "lag": lag, "mask": mask, "kept": kept, "accepted": accepted, "ms": ms,
                       "emitted": accepted if ended else accepted + 1})  # fmt: skip
        lag = accepted - min(accepted, answer.q[position, mask]) if caught_up else lag + 1 + accepted
        history.append(accepted)
        position += accepted + 1
    return rounds


@pytest.mark.parametrize("schedule", [Mask(0), Mask(0b101), Mask(0b111), PICKY, SPARE],
                         ids=["small", "5", "medium", "rules", "spare"])  # fmt: skip
@pytest.mark.parametrize("cut", CUTS)
def test_replay_is_what_a_plain_loop_does(schedule, cut: str) -> None:
    answers = random_log(1, (30, 2, 1, 17, 3))
    run = replay(answers, schedule, CUTS[cut], COSTLY, DRAFTING)
    for index, answer in enumerate(answers):
        rounds = by_hand(answer, schedule, CUTS[cut], COSTLY, 3)
        mine = run.trace["answer"] == index
        for name in ("position", "lag", "mask", "kept", "accepted"):
            assert run.trace[name][mine].tolist() == [r[name] for r in rounds]
        assert run.decode_ms[index] == pytest.approx(sum(r["ms"] for r in rounds))
        prompt_ms = float(COSTLY.target(answer.prompt_length, 0))
        assert run.ms[index] == pytest.approx(prompt_ms + run.decode_ms[index])
        assert run.tokens[index] == answer.length == 1 + sum(r["emitted"] for r in rounds)
        assert run.rounds[index] == len(rounds) and run.accepted[index] == sum(r["accepted"] for r in rounds)


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """A tiny pair, four prompts as token ids, and the answers of their log."""
    folder = tmp_path_factory.mktemp("replay")
    target, medium = make_pair(folder)
    texts = [" ".join(f"t{token}" for token in ids) for ids in prompts(4, size=40, seed=3)]
    wanted = [Prompt("tiny", str(i), text=text) for i, text in enumerate(texts)]
    drafting = Drafting(depth=3, width=3, children=3, budget=10)
    collect(target, medium, wanted, folder / "log", drafting, Sampling(), 24)
    ids = [target.tokenizer(text)["input_ids"] for text in texts]
    return target, medium, ids, drafting, read_log(folder / "log")[1]


@pytest.mark.parametrize("schedule", [Mask(0), Mask(0b010), Mask(0b101), Mask(0b111), PICKY],
                         ids=["small", "2", "5", "medium", "rules"])  # fmt: skip
@pytest.mark.parametrize("cut", CUTS)
def test_replay_is_what_live_decoding_does(collected, schedule, cut: str) -> None:
    target, medium, ids, drafting, answers = collected
    plan = Plan("plan", schedule, drafting, CUTS[cut])
    trace = replay(answers, schedule, plan.cut, COSTLY, drafting).trace
    for index, prompt in enumerate(ids):
        live = decode(target, medium, prompt, plan, 24)
        assert len(live.tokens) == answers[index].length
        mine = trace["answer"] == index
        for name in ("position", "lag", "mask", "kept", "accepted", "tokens"):
            assert trace[name][mine].tolist() == [getattr(r, name) for r in live.rounds], name
        assert trace["tokens"][mine].astype(bool).sum() == sum(r.medium_calls for r in live.rounds)


def test_the_live_comparison_covers_accepted_drafts_lags_and_both_decisions(collected) -> None:
    *_, drafting, answers = collected
    trace = replay(answers, PICKY, WORTH, COSTLY, drafting).trace
    assert trace["accepted"].max() >= 2 and len(np.unique(trace["mask"])) >= 4 and len(np.unique(trace["lag"])) >= 5
    assert {SIGNALS[name].trajectory for name in PICKY.reads} == {True, False} and set(TRAJECTORY) <= set(PICKY.reads)


def test_a_budget_of_medium_calls_holds_in_replay_as_live(collected) -> None:
    target, medium, ids, drafting, answers = collected
    limited = replace(drafting, medium_calls=1)
    trace = replay(answers, Mask(0b111), WORTH, COSTLY, limited).trace
    live = decode(target, medium, ids[1], Plan("limited", Mask(0b111), limited, WORTH), 24)
    assert trace["mask"][trace["answer"] == 1].tolist() == [r.mask for r in live.rounds]
    assert set(trace["mask"].tolist()) == {0b001}


def exhaustive(answer: Answer, cut: Cut, profile: LatencyProfile, cuts: bool) -> float:
    """Least decode ms over every choice of mask (and of accepted length, if `cuts`) in every round."""

    def go(position: int, lag: int) -> float:
        if position >= answer.length - 1:
            return 0.0
        context, best = answer.prompt_length + position, np.inf
        for mask in range(8):
            scores = [float(s) for s in answer.log_s[position, mask] if s > -np.inf]
            ranks = [int(rank) for rank in answer.ranks[position, mask] if rank < len(scores)]
            kept = cut.size(scores, context)
            choices = [(a, ranks[a - 1] + 1 if a else 0) for a in range(len(ranks) + 1)] if cuts else [
                (sum(rank < kept for rank in ranks), kept)
            ]  # fmt: skip
            for accepted, nodes in choices:
                ms, owed = float(profile.target(nodes + 1, context)) + profile.round_ms, lag
                for step in range(3):
                    ms += profile.medium_step_ms if mask >> step & 1 else profile.small_step_ms
                    if count := answer.tokens[position, mask, step]:
                        ms, owed = ms + float(profile.medium(owed + count, context)), 0
                called = answer.tokens[position, mask].any()
                ms += profile.medium_first_ms if called else 0
                left = accepted - min(accepted, answer.q[position, mask]) if called else lag + 1 + accepted
                best = min(best, ms + go(position + accepted + 1, int(left)))
        return best

    return go(0, answer.prompt_length)


def test_the_oracle_is_the_best_of_everything() -> None:
    answers = random_log(2, (5, 4, 2, 1))
    found = oracle(answers, WORTH, COSTLY)
    for index, answer in enumerate(answers):
        assert found.masks_ms[index] == pytest.approx(exhaustive(answer, WORTH, COSTLY, cuts=False))
        assert found.cuts_ms[index] == pytest.approx(exhaustive(answer, WORTH, COSTLY, cuts=True))


def test_no_schedule_beats_the_oracle() -> None:
    answers = random_log(3, (25, 18, 31))
    found = oracle(answers, WORTH, COSTLY)
    assert (found.cuts_ms <= found.masks_ms + 1e-9).all()
    for schedule in (*(Mask(bits) for bits in range(8)), PICKY):
        assert (found.masks_ms <= replay(answers, schedule, WORTH, COSTLY, DRAFTING).decode_ms + 1e-9).all()


def test_rho_is_the_rate_of_a_replay_that_uses_it() -> None:
    answers = random_log(4, (60, 50, 40))
    settled = 0
    for bits in range(8):
        rho, run = fixed_point(answers, Mask(bits), COSTLY, DRAFTING)
        assert run.rho == pytest.approx((60 + 50 + 40 - 3) / run.decode_ms.sum())
        again = replay(answers, Mask(bits), Cut("worth", rho, COSTLY), COSTLY, DRAFTING)
        assert run.decode_ms.tolist() == again.decode_ms.tolist()
        # A cut is a step function of rho, which may jump over its fixed point; then no step of the iteration gains.
        settled += rho == pytest.approx(run.rho, rel=1e-6)
        onwards = replay(answers, Mask(bits), Cut("worth", run.rho, COSTLY), COSTLY, DRAFTING)
        assert onwards.rho <= run.rho * (1 + 1e-6)
    assert settled >= 5


def test_the_best_mask_is_the_fastest() -> None:
    answers = random_log(5, (40, 30, 20))
    rates = [fixed_point(answers, Mask(bits), COSTLY, DRAFTING)[1].rho for bits in range(8)]
    assert best_mask(answers, COSTLY, DRAFTING) == int(np.argmax(rates))
    limited = replace(DRAFTING, medium_calls=1)
    allowed = [bits for bits in range(8) if bits.bit_count() <= 1]
    assert best_mask(answers, COSTLY, limited) == max(allowed, key=lambda bits: rates[bits])


def test_figures_of_evaluate_by_hand() -> None:
    answers = random_log(6, (20, 10, 15))
    result = evaluate(answers, [Plan("five", Mask(5), DRAFTING, WORTH)], COSTLY)
    run = replay(answers, Mask(5), WORTH, COSTLY, DRAFTING)
    plain = sum(
        float(COSTLY.target(a.prompt_length, 0))
        + sum(float(COSTLY.target(1, a.prompt_length + t)) for t in range(a.length - 1))
        for a in answers
    )  # fmt: skip
    assert set(result["by_file"]) == {"f0", "f1"} and list(result["overall"]) == [AUTOREGRESSIVE.name, "five"]
    figures = result["overall"]["five"]
    assert figures["tokens"] == 45 and figures["rounds"] == run.rounds.sum()
    assert figures["tokens_per_second"] == pytest.approx(45e3 / run.ms.sum())
    assert figures["speedup"] == pytest.approx(plain / run.ms.sum())
    assert figures["accepted_per_round"] == pytest.approx(run.accepted.sum() / run.rounds.sum())
    assert figures["medium_calls_per_round"] == pytest.approx(run.medium_calls.sum() / run.rounds.sum())
    low, high = figures["speedup_interval"]
    assert low <= figures["speedup"] <= high
    assert result["rho"]["five"] == pytest.approx(fixed_point(answers, Mask(5), COSTLY, DRAFTING)[0])
    assert figures["over"][AUTOREGRESSIVE.name]["gain"] == pytest.approx(figures["speedup"])
    assert result["overall"][AUTOREGRESSIVE.name]["speedup_interval"] == [1.0, 1.0]


def test_the_interval_is_paired_by_prompt() -> None:
    # Prompts differ a hundredfold in length, but the speedup is two on each: no spread is left.
    records = [Record("f", str(i), name, 10**i, 10**i / speed, 1, 0, 0)
               for i in range(3) for name, speed in (("autoregressive", 1.0), ("fast", 2.0))]  # fmt: skip
    assert summarise(records)["overall"]["fast"]["speedup_interval"] == pytest.approx([2.0, 2.0])
    with pytest.raises(ValueError, match="f/2: no record of schedule 'fast'"):
        summarise(records[:-1])
    with pytest.raises(ValueError, match="no records of 'autoregressive'"):
        summarise([r for r in records if r.schedule == "fast"])


def test_a_log_that_cannot_be_replayed_is_refused() -> None:
    answer = random_answer(np.random.default_rng(0), 8)
    holed = replace(answer, positions=np.delete(answer.positions, 3))
    with pytest.raises(LogError, match="6 of 7 positions are logged"):
        replay([holed], Mask(0), WORTH, COSTLY, DRAFTING)
    with pytest.raises(LogError, match="K = 3, but the schedule drafts with K = 5"):
        replay([answer], Mask(0), WORTH, COSTLY, Drafting(depth=5, budget=6))
    with pytest.raises(LogError, match="B = 6, but the schedule drafts with B = 24"):
        replay([answer], Mask(0), WORTH, COSTLY, Drafting(depth=3))
    short = replace(answer, possible=np.array([mask.bit_count() <= 1 for mask in range(8)])[None].repeat(7, axis=0))
    with pytest.raises(LogError, match="no mask 0b111"):
        replay([short], Mask(7), WORTH, COSTLY, DRAFTING)
    with pytest.raises(LogError, match="no answers"):
        replay([], Mask(0), WORTH, COSTLY, DRAFTING)


def test_answers_of_one_token_are_no_trouble() -> None:
    answers = random_log(7, (1, 1))
    run = replay(answers, Mask(7), WORTH, COSTLY, DRAFTING)
    assert run.rounds.tolist() == [0, 0] and run.decode_ms.tolist() == [0.0, 0.0]
    assert best_mask(answers, COSTLY, DRAFTING) == 0
    assert oracle(answers, WORTH, COSTLY).masks_ms.tolist() == [0.0, 0.0]


def test_a_log_on_disk_replays_the_same(collected, tmp_path: Path) -> None:
    *_, drafting, answers = collected
    again = replay(answers, PICKY, WORTH, COSTLY, drafting)
    alone = [replay([answer], PICKY, WORTH, COSTLY, drafting) for answer in answers]
    assert again.ms.tolist() == pytest.approx([run.ms[0] for run in alone])
    masks = [replay(answers, Mask(bits), WORTH, COSTLY, drafting).decode_ms for bits, _ in product(range(8), range(1))]
    assert (oracle(answers, WORTH, COSTLY).masks_ms <= np.min(masks, axis=0) + 1e-9).all()
