"""The default models, on prompts that the package ships."""

import pytest
from tiny import greedy, same_text

from treegraft.data.prompts import Conversation, read_prompts, shipped
from treegraft.runtime.decode import AUTOREGRESSIVE, Plan, decode
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.models import Model, check_pair, load_model
from treegraft.runtime.sampling import Chooser
from treegraft.runtime.scheduler import Mask, Rule, Rules
from treegraft.runtime.size import Cut
from treegraft.runtime.ties import compare_texts

RULES = Rules(
    (Rule(1, (("root_match", "<=", 1.0),)), Rule(2, (("target_entropy", ">", 1.0),))), ("root_match", "target_entropy")
)
SCHEDULES = {"small": Mask(0), "medium": Mask(31), "0b00101": Mask(5), "rules": RULES}
TOKENS = 32


@pytest.fixture(scope="module")
def models() -> tuple[Model, Model]:
    pair = load_model("default"), load_model("default-medium")
    check_pair(*pair)
    return pair


def ids_of(target: Model, which: int) -> list[int]:
    return Conversation(read_prompts(shipped("bench"), 1)[which], target.tokenizer).ids(0)


@pytest.mark.parametrize("which", [0, 1, 3])
def test_greedy_and_sampled_text_are_the_targets_own_under_every_schedule(models, which: int) -> None:
    target, medium = models
    prompt = ids_of(target, which)
    reference = greedy(target, prompt, TOKENS)
    chooser = Chooser.make(temperature=0.7, top_p=0.9, repetition_penalty=1.1, seed=which)
    sampled = decode(target, None, prompt, AUTOREGRESSIVE, TOKENS, chooser).tokens
    accepted = 0
    for name, schedule in SCHEDULES.items():
        plan = Plan(name, schedule, Drafting(), Cut("score", log_s=-2.5))
        decoded = decode(target, medium, prompt, plan, TOKENS)
        assert same_text(target, prompt, decoded.tokens, reference), name
        ours = decode(target, medium, prompt, plan, TOKENS, chooser).tokens
        assert compare_texts(target, prompt, ours, sampled, chooser) in ("equal", "tie"), name
        accepted += sum(done.accepted for done in decoded.rounds)
    assert accepted > 10


def test_the_default_medium_drafter_often_agrees_with_the_target(models) -> None:
    target, medium = models
    plan = Plan("medium", Mask(31), Drafting(), Cut("none"))
    rounds = [r for which in (0, 1) for r in decode(target, medium, ids_of(target, which), plan, TOKENS).rounds]
    assert sum(r.accepted for r in rounds) / len(rounds) > 0.7
