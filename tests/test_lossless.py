"""Whatever is drafted and verified, the emitted text is the target's own (spec section 3)."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import torch
from tiny import ARCHITECTURES, greedy, prompts, same_text
from torch.utils.hooks import RemovableHandle

from treegraft.runtime import decode as decoding
from treegraft.runtime.decode import AUTOREGRESSIVE, Decoded, Plan, PromptCache, Round, decode, decode_rounds
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.latency import Curve, LatencyProfile
from treegraft.runtime.models import Model, load_model
from treegraft.runtime.sampling import Chooser
from treegraft.runtime.scheduler import Mask, Rule, Rules
from treegraft.runtime.size import Cut
from treegraft.runtime.tree import DraftTree
from treegraft.runtime.trial import check_branching

DRAFTING = Drafting(depth=3, width=3, children=3, budget=16)
MEDIUM = 0b111
TOKENS = 32
PROMPTS = prompts(20)
PROFILE = LatencyProfile(Curve((1, 2, 8, 17), (1.0, 1.05, 1.4, 2.4)), Curve((1, 9), (0.4, 0.7)))


def plan(mask: int, drafting: Drafting = DRAFTING, cut: Cut | None = None) -> Plan:
    return Plan(bin(mask), Mask(mask), drafting, cut or Cut("none"))


def rounds_of(answers: list[Decoded]) -> list[Round]:
    return [one for answer in answers for one in answer.rounds]


def mean_accepted(answers: list[Decoded]) -> float:
    rounds = rounds_of(answers)
    return sum(one.accepted for one in rounds) / len(rounds)


@pytest.fixture(scope="module")
def references(pair) -> dict[str, list[list[int]]]:  # type: ignore[no-untyped-def]
    return {kind: [greedy(pair(kind)[0], prompt, TOKENS) for prompt in PROMPTS] for kind in ARCHITECTURES}


@pytest.fixture
def accepted_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """For every node accepted while the test runs: is it a later child than its parent's first?"""
    seen: list[bool] = []
    accept = decoding.accept

    def watched(tree: DraftTree, *rest: object) -> object:
        result = accept(tree, *rest)  # type: ignore[arg-type]
        seen.extend(tree.children[tree.parent[node]][0] != node for node in result[0])
        return result

    monkeypatch.setattr(decoding, "accept", watched)
    yield seen


@pytest.fixture(autouse=True)
def ties_are_rare() -> Iterator[None]:
    before = len(tiny.TIES)
    yield
    assert len(tiny.TIES) - before <= 1, f"forgiven ties: {tiny.TIES[before:]}"


def assert_lossless(target: Model, answers: list[Decoded], references: list[list[int]]) -> None:
    for prompt, answer, reference in zip(PROMPTS, answers, references):
        assert same_text(target, prompt, answer.tokens, reference), prompt


def test_the_reference_texts_are_worth_comparing(references) -> None:  # type: ignore[no-untyped-def]
    for kind, texts in references.items():
        assert all(len(text) == TOKENS for text in texts)
        assert len({tuple(text) for text in texts}) == len(texts)
        assert sum(len(set(text)) for text in texts) / len(texts) > 12, kind


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_greedy_text_is_the_targets_under_every_schedule(pair, references, accepted_nodes, kind) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair(kind)
    for mask in range(1 << DRAFTING.depth):
        answers = [decode(target, medium, prompt, plan(mask), TOKENS) for prompt in PROMPTS]
        assert_lossless(target, answers, references[kind])
        assert all(one.mask == mask for one in rounds_of(answers))
        if mask == MEDIUM:
            assert mean_accepted(answers) > 0.5
            assert max(one.accepted for one in rounds_of(answers)) == DRAFTING.depth
        # Any path but the first children's can only be right by the tree mask and the positions.
        assert mask == 0 or sum(accepted_nodes) > 20
        accepted_nodes.clear()


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_chain_drafted_by_the_target_itself_is_always_accepted(pair, references, kind) -> None:  # type: ignore[no-untyped-def]
    target, _ = pair(kind)
    chain = Drafting(depth=3, width=1, children=1)
    answers = [decode(target, target, prompt, plan(MEDIUM, chain), TOKENS) for prompt in PROMPTS[:5]]
    assert_lossless(target, answers, references[kind])
    assert all(one.accepted == chain.depth for answer in answers for one in answer.rounds[:-1])


def test_without_drafting_the_text_is_the_targets(pair, references) -> None:  # type: ignore[no-untyped-def]
    target, _ = pair("qwen3")
    answers = [decode(target, None, prompt, AUTOREGRESSIVE, TOKENS) for prompt in PROMPTS]
    assert_lossless(target, answers, references["qwen3"])
    assert all(one.drafted == 0 for one in rounds_of(answers))


def test_a_small_only_schedule_needs_no_medium_drafter(pair, references) -> None:  # type: ignore[no-untyped-def]
    target, _ = pair("gpt_neox")
    answers = [decode(target, None, prompt, plan(0), TOKENS) for prompt in PROMPTS]
    assert_lossless(target, answers, references["gpt_neox"])
    assert sum(one.accepted for one in rounds_of(answers)) > 0
    with pytest.raises(ValueError, match="--medium"):
        decode(target, None, PROMPTS[0], plan(1), TOKENS)


@pytest.mark.parametrize(
    "cut", [Cut("worth", rho=1.0, profile=PROFILE), Cut("score", log_s=-2.5), Cut("score", log_s=0.5)], ids=str
)
def test_the_text_does_not_depend_on_the_verification_size(pair, references, cut) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair("llama")
    for mask in (0b000, 0b010, 0b111):
        answers = [decode(target, medium, prompt, plan(mask, cut=cut), TOKENS) for prompt in PROMPTS[:5]]
        assert_lossless(target, answers, references["llama"])
        rounds = rounds_of(answers)
        if cut.log_s > 0:
            assert all(one.kept == 0 for one in rounds)
        elif mask:
            assert any(0 < one.kept < min(one.drafted, DRAFTING.budget) for one in rounds)
            assert mean_accepted(answers) > 0.3


@pytest.mark.parametrize(
    "limits",
    [
        {"pool": 1},
        {"pool": 2},
        {"pool": 4},
        {"medium_calls": 0},
        {"medium_calls": 1},
        {"pool": 2, "medium_calls": 2},
        {"budget": 1},
        {"width": 1, "children": 1},
    ],
    ids=str,
)
def test_the_text_does_not_depend_on_limits(pair, references, limits) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair("mistral")
    drafting = Drafting(**{**DRAFTING.as_dict(), **limits})
    for mask in (0b101, 0b110, 0b111):
        answers = [decode(target, medium, prompt, plan(mask, drafting), TOKENS) for prompt in PROMPTS[:5]]
        assert_lossless(target, answers, references["mistral"])
        for one in rounds_of(answers):
            assert all(count <= (drafting.pool or 1000) for count in one.tokens)
            assert one.medium_calls <= (3 if drafting.medium_calls is None else drafting.medium_calls)
            assert one.kept <= drafting.budget
        if drafting.medium_calls != 0:
            assert mean_accepted(answers) > 0.2


def test_the_text_does_not_depend_on_rules_that_read_signals(pair, references) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair("qwen2")
    rules = (
        Rule(1, (("target_entropy", ">", 2.5),)),
        Rule(2, (("lag", ">", 2.0),)),
        Rule(3, (("accepted_last", ">", 0.0),)),
    )
    reads = ("target_entropy", "lag", "accepted_last")
    learned = Plan("rules", Rules(rules, reads), DRAFTING, Cut("none"))
    answers = [decode(target, medium, prompt, learned, TOKENS) for prompt in PROMPTS[:8]]
    assert_lossless(target, answers, references["qwen2"])
    assert len({one.mask for one in rounds_of(answers)}) > 2


def test_a_reduced_draft_vocabulary_changes_speed_not_text(pair, references, tmp_path: Path, accepted_nodes) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair("llama")
    medium.lm.save_pretrained(tmp_path)
    medium.tokenizer.save_pretrained(tmp_path)
    common = sorted(token for token in range(tiny.VOCABULARY) if token % 3)
    (tmp_path / "draft_vocabulary.json").write_text(json.dumps(common))
    reduced = load_model(str(tmp_path))
    assert reduced.lm.get_output_embeddings().weight.shape[0] == len(common)
    for mask in (0b011, 0b100, 0b111):
        answers = [decode(target, reduced, prompt, plan(mask), TOKENS) for prompt in PROMPTS[:8]]
        assert_lossless(target, answers, references["llama"])
        assert mean_accepted(answers) > 0.2
    assert sum(accepted_nodes) > 20


def test_the_answer_ends_with_the_end_of_sequence_wherever_it_falls(pair, references) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair("qwen3")
    target = copy.deepcopy(target)
    lengths = set()
    for prompt, reference in zip(PROMPTS[:6], references["qwen3"]):
        for ends in (reference[5], [reference[9], reference[17]]):
            target.lm.generation_config.eos_token_id = ends
            target.lm.generation_config.pad_token_id = 0
            expected = greedy(target, prompt, TOKENS)
            lengths.add(len(expected))
            for mask in (0b000, 0b101, 0b111):
                answer = decode(target, medium, prompt, plan(mask), TOKENS)
                assert same_text(target, prompt, answer.tokens, expected)
    assert len(lengths) > 2 and max(lengths) < TOKENS


def test_the_answer_never_exceeds_the_tokens_asked_for(pair, references) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair("llama")
    for count in (1, 2, 3, 5, 7):
        for mask in (0b000, 0b111):
            for prompt, reference in zip(PROMPTS[:4], references["llama"]):
                answer = decode(target, medium, prompt, plan(mask), count)
                assert len(answer.tokens) == count
                assert same_text(target, prompt, answer.tokens, reference[:count])
                # Each round emits what it accepted and one bonus token; the last is clipped.
                assert sum(one.accepted + 1 for one in answer.rounds) + 1 >= count
                assert sum(one.accepted for one in answer.rounds) <= count - 1


def test_a_one_token_answer_drafts_nothing(pair) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair("llama")
    answer = decode(target, medium, PROMPTS[3], plan(MEDIUM), 1)
    assert answer.tokens == greedy(target, PROMPTS[3], 1)
    assert answer.rounds == []


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_prompt_of_one_token_is_a_prompt(pair, kind) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair(kind)
    for token in (3, 77):
        reference = greedy(target, [token], TOKENS)
        for mask in (0b000, 0b001, 0b111):
            assert same_text(target, [token], decode(target, medium, [token], plan(mask), TOKENS).tokens, reference)


def test_greedy_with_a_repetition_penalty_is_generates(pair) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair("gpt_neox")
    chooser = Chooser.make(repetition_penalty=1.3)
    for prompt in PROMPTS[:6]:
        ids = torch.tensor([prompt])
        reference = target.lm.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, repetition_penalty=1.3, max_new_tokens=TOKENS
        )
        for mask in (0b000, 0b111):
            answer = decode(target, medium, prompt, plan(mask), TOKENS, chooser)
            assert same_text(target, prompt, answer.tokens, reference[0, len(prompt) :].tolist(), chooser)


def test_the_tie_rule_forgives_ties_only(pair) -> None:  # type: ignore[no-untyped-def]
    target, _ = pair("llama")
    prompt = PROMPTS[2]
    reference = greedy(target, prompt, 6)
    ids = torch.tensor([prompt + reference[:3]])
    second = int(target.lm(ids, use_cache=False).logits[0, -1].topk(2).indices[1])
    other = [*reference[:3], second, *reference[4:]]
    assert not same_text(target, prompt, other, reference)
    assert not same_text(target, prompt, reference[:5], reference)
    tied = copy.deepcopy(target)
    with torch.no_grad():
        head = tied.lm.get_output_embeddings().weight
        head[second] = head[reference[3]]
    before = len(tiny.TIES)
    assert same_text(tied, prompt, other, reference)
    assert len(tiny.TIES) == before + 1
    assert not same_text(tied, prompt, [*reference[:3], (second + 1) % tiny.VOCABULARY], reference[:4])
    tiny.TIES.pop()


def test_a_later_turn_processes_its_new_tokens_only(pair) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair("llama")
    cache = PromptCache(target, medium)
    prompt = PROMPTS[7]
    first: dict[str, int] = {}  # tokens of each model's first forward in a turn

    def watch(role: str, model: Model) -> RemovableHandle:
        def note(_: object, inputs: object, output: torch.Tensor) -> None:
            first.setdefault(role, output.shape[-2])

        return model.lm.get_input_embeddings().register_forward_hook(note)

    hooks = [watch("target", target), watch("medium", medium)]
    check_branching(target.name, target.lm)  # as a model with a new hook is, before its next text
    for turn in range(3):
        first.clear()
        answer = decode(target, medium, prompt, plan(MEDIUM), TOKENS, cache=cache)
        if turn == 0:
            assert first["target"] == len(prompt)
        else:  # the new tokens, and what no round had processed of the earlier answer
            assert first["target"] in (3, 4) and first["medium"] < 3 + 2 * (DRAFTING.depth + 1) + DRAFTING.budget
        later = prompt + answer.tokens + [5, 6, 7]
        assert same_text(target, prompt, answer.tokens, greedy(target, prompt, TOKENS))
        prompt = later
    for hook in hooks:
        hook.remove()


def test_a_prompt_cache_serves_any_next_prompt(pair) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair("qwen3")
    cache = PromptCache(target, medium)
    first = PROMPTS[9] + PROMPTS[11]
    for prompt in (first, first[:6], first, [*first[:4], 9, 9], [8], first[:-1]):
        answer = decode(target, medium, prompt, plan(MEDIUM), 12, cache=cache)
        assert same_text(target, prompt, answer.tokens, greedy(target, prompt, 12))


def test_a_prompt_cache_survives_an_interrupted_answer(pair) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair("mistral")
    cache = PromptCache(target, medium)
    for _ in decode_rounds(target, medium, PROMPTS[5], plan(MEDIUM), TOKENS, cache=cache):
        if len(cache.text) > len(PROMPTS[5]) + 6:
            break
    answer = decode(target, medium, PROMPTS[5], plan(MEDIUM), TOKENS, cache=cache)
    assert same_text(target, PROMPTS[5], answer.tokens, greedy(target, PROMPTS[5], TOKENS))
    with pytest.raises(ValueError, match="other models"):
        decode(target, None, PROMPTS[5], plan(0), TOKENS, cache=cache)
