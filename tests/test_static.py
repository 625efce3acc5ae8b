"""Forwards of a few fixed shapes, as CUDA graphs need them, run here on the CPU: same texts, nothing that waits."""

import gc
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from tiny import ARCHITECTURES, VOCABULARY, config, greedy, prompts, same_text, save_lm
from torch.overrides import TorchFunctionMode

from treegraft.runtime import static
from treegraft.runtime.cache import Captured
from treegraft.runtime.decode import AUTOREGRESSIVE, Plan, PromptCache, decode
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.forward import TreeForward
from treegraft.runtime.models import load_model
from treegraft.runtime.scheduler import Mask
from treegraft.runtime.size import Cut
from treegraft.runtime.static import LEAST_LENGTH, SIZES, Capturable
from treegraft.runtime.tree import Paths
from treegraft.runtime.trial import check_branching

DRAFTING = Drafting(depth=3, width=3, children=3, budget=16)
TOKENS = 32
PROMPTS = prompts(6)
GRAPH = Captured(cast(Any, None), torch.empty(0), torch.empty(0))


@pytest.fixture(autouse=True)
def static_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "DEVICES", ("cpu",))


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[tuple[int, ...]]]:
    """The shapes of the steps that a CUDA graph would replay: rows and columns of the inputs, slots read."""
    seen = Counter[tuple[int, ...]]()
    replay = static.replay

    def watched(step: static.Step, inputs: torch.Tensor, cache: Any) -> torch.Tensor:
        seen[*inputs.shape, cache.slots.read] += 1
        return replay(step, inputs, cache)

    monkeypatch.setattr(static, "replay", watched)
    yield seen


def plan(mask: int, drafting: Drafting = DRAFTING) -> Plan:
    return Plan(bin(mask), Mask(mask), drafting, Cut("none"))


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_greedy_text_is_the_same_in_padded_forwards(pair, kind) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair(kind)
    accepted = 0
    for prompt in PROMPTS:
        reference = greedy(target, prompt, TOKENS)
        for way in (AUTOREGRESSIVE, plan(0b000), plan(0b100), plan(0b011), plan(0b111)):
            answer = decode(target, medium, prompt, way, TOKENS)
            assert same_text(target, prompt, answer.tokens, reference)
            accepted += sum(one.accepted for one in answer.rounds)
    assert accepted > 100


def test_all_forwards_but_the_prompts_have_one_of_a_few_shapes(pair, replayed) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair("llama")
    calls = Counter[str]()
    hooks = [
        model.lm.get_input_embeddings().register_forward_hook(lambda *_, role=role: calls.update([role]))
        for role, model in (("target", target), ("medium", medium))
    ]
    check_branching(target.name, target.lm)  # as a model with a new hook is, before its next text
    calls.clear()
    replayed.clear()
    rounds = medium_calls = 0
    for prompt in PROMPTS:
        for mask in (0b000, 0b101, 0b111):
            answer = decode(target, medium, prompt, plan(mask), TOKENS)
            rounds += len(answer.rounds)
            medium_calls += sum(one.medium_calls for one in answer.rounds)
    for hook in hooks:
        hook.remove()
    assert calls == {"target": rounds + 3 * len(PROMPTS), "medium": medium_calls}
    assert sum(replayed.values()) == rounds + medium_calls - 2 * len(PROMPTS)  # a first call is the drafter's prompt
    assert {columns for _, columns, _ in replayed} <= set(SIZES)
    assert len({columns for _, columns, _ in replayed}) > 2
    assert {(rows, length) for rows, _, length in replayed} == {(4 + static.LEAST_BRANCH, LEAST_LENGTH)}


def test_a_step_does_nothing_that_a_graph_cannot_hold(pair) -> None:  # type: ignore[no-untyped-def]
    for kind in ARCHITECTURES:
        model, _ = pair(kind)
        forward = TreeForward(model)
        committed = [5, 6, 7]
        paths = Paths(8, committed, 6)
        first, second = paths.child(0, 9), paths.child(0, 10)
        forward(committed, paths, [0])
        with Capturable():
            forward(committed, paths, [first, second, paths.child(second, 11)])
            forward.commit([0, second])
        assert forward.seen == 5


def test_what_a_graph_cannot_hold_is_found(pair, tmp_path) -> None:  # type: ignore[no-untyped-def]
    numbers = torch.arange(4)
    for waits in (
        lambda: numbers.max().item(),
        lambda: bool(numbers[0] == 0),
        lambda: numbers[numbers > 1],
        lambda: numbers.nonzero(),
        lambda: numbers.clone().index_put_((numbers > 1,), numbers[0]),
        lambda: numbers.to("meta"),
        lambda: numbers[0].to("meta"),
    ):
        with pytest.raises(RuntimeError, match="makes the host wait"), Capturable():
            waits()
    with Capturable():
        assert numbers[torch.tensor([1, 2])].shape == (2,)
    # Rotary embeddings that follow the longest position look at it on the host.
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = load_model(str(save_lm(tmp_path, config("llama", rope_parameters=rope), 0)))
    with pytest.raises(RuntimeError, match="makes the host wait"), torch.inference_mode(), Capturable():
        model.lm(torch.tensor([[1, 2]]))


class Reads(TorchFunctionMode):
    """Counts what the host asks of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asking = ("tolist", "item", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
        self.count += getattr(func, "__name__", "") in asking
        return func(*args, **(kwargs or {}))


def test_the_host_reads_accepted_tokens_once_a_round_and_proposals_once_a_call(pair) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair("qwen3")
    for mask in (0b000, 0b111):
        with Reads() as reads:
            answer = decode(target, medium, PROMPTS[3], plan(mask), TOKENS)
        calls = sum(one.medium_calls for one in answer.rounds)
        assert len(answer.rounds) > 5 and (calls > 5) == (mask > 0)
        assert reads.count == 1 + len(answer.rounds) + calls


def test_a_cache_with_its_graphs_goes_from_one_text_to_the_next(pair) -> None:  # type: ignore[no-untyped-def]
    target, _ = pair("mistral")
    first, second = TreeForward(target), TreeForward(target)
    assert first.cache is not second.cache
    first([5, 6], Paths(7, [5, 6], 6), [0])
    used = first.cache
    del first
    third = TreeForward(target)
    assert third.cache is used
    with torch.inference_mode():
        weight = target.lm.get_input_embeddings().weight
        before = weight.data
        weight.data = before.clone()
    assert TreeForward(target).cache not in (used, second.cache)
    weight.data = before


def test_one_idle_cache_is_kept_the_longest_until_it_is_released(pair) -> None:  # type: ignore[no-untyped-def]
    target, _ = pair("qwen2")
    forwards = [TreeForward(target) for _ in range(3)]
    for forward, slots in zip(forwards, (300, 600, 300)):
        forward.cache.hold(slots)
    longest = forwards[1].cache
    del forward
    forwards.clear()
    again = TreeForward(target)
    assert again.cache is longest
    assert TreeForward(target).cache.slots.held == 0
    del again
    static.release(target.lm)
    assert TreeForward(target).cache is not longest


@pytest.mark.parametrize("change", ["hook", "adapter", "mode", "buffer"])
def test_a_model_that_is_no_longer_what_was_captured_ends_its_graphs(tmp_path, change) -> None:  # type: ignore[no-untyped-def]
    lm: Any = (target := load_model(str(save_lm(tmp_path, config("llama"), 0)))).lm
    forward = TreeForward(target)
    forward.cache.captured[0,] = GRAPH
    forward.rewind(0)
    assert forward.cache.captured
    if change == "hook":
        lm.model.layers[0].register_forward_hook(lambda *_: None)
    elif change == "adapter":
        lm.model.layers[0].mlp._active_adapter = "other"
    elif change == "mode":
        lm.train()
    else:
        lm.model.rotary_emb.inv_freq = lm.model.rotary_emb.inv_freq / 2
    forward.rewind(0)
    assert not forward.cache.captured


def test_an_earlier_texts_slots_do_not_show(pair) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair("gpt_neox")
    gc.collect()
    for prompt in (PROMPTS[5] * 3, PROMPTS[2], PROMPTS[5] * 2, PROMPTS[4]):
        answer = decode(target, medium, prompt, plan(0b110), TOKENS)
        assert same_text(target, prompt, answer.tokens, greedy(target, prompt, TOKENS))


def test_a_text_that_outgrows_its_buffers_goes_on_in_longer_ones(pair, replayed) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair("llama")
    rng = random.Random(0)
    prompt = [rng.randrange(VOCABULARY) for _ in range(LEAST_LENGTH - 40)]
    cache = PromptCache(target, medium)
    captured = cache.verifier.cache.captured
    captured[0,] = GRAPH
    answer = decode(target, medium, prompt, plan(0b011), 48, cache=cache)
    assert same_text(target, prompt, answer.tokens, greedy(target, prompt, 48))
    assert {length for *_, length in replayed} == {LEAST_LENGTH, 2 * LEAST_LENGTH}
    assert not captured  # graphs of the buffers that it left


def test_forwards_of_more_tokens_than_any_shape_are_not_padded(pair, replayed) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair("qwen2")
    wide = replace(DRAFTING, width=16, children=16, budget=2 * SIZES[-1])
    answer = decode(target, medium, PROMPTS[3], plan(0b111, wide), TOKENS)
    assert same_text(target, PROMPTS[3], answer.tokens, greedy(target, PROMPTS[3], TOKENS))
    assert any(one.kept >= SIZES[-1] for one in answer.rounds)
    assert {columns for _, columns, _ in replayed} <= set(SIZES)


def test_branches_deeper_than_usual_have_a_shape_of_their_own(pair, replayed) -> None:  # type: ignore[no-untyped-def]
    target, _ = pair("llama")
    chain = Drafting(depth=static.LEAST_BRANCH + 2, width=1, children=1)
    answer = decode(target, target, PROMPTS[4], plan(2**chain.depth - 1, chain), TOKENS)
    assert same_text(target, PROMPTS[4], answer.tokens, greedy(target, PROMPTS[4], TOKENS))
    assert max(one.accepted for one in answer.rounds) == chain.depth
    assert {rows for rows, *_ in replayed} == {4 + static.LEAST_BRANCH, 4 + 2 * static.LEAST_BRANCH}
