"""The same on a GPU: texts, and the graphs that are replayed there. Skipped where there is none."""

import gc
import random
import warnings

import pytest
import torch
from tiny import ARCHITECTURES, VOCABULARY, config, greedy, prompts, same_text, save_lm

from treegraft.runtime import static
from treegraft.runtime.decode import Plan, PromptCache, decode
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.forward import TreeForward
from treegraft.runtime.models import Model, load_model
from treegraft.runtime.scheduler import Mask
from treegraft.runtime.size import Cut
from treegraft.runtime.tree import Paths

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DRAFTING = Drafting(depth=3, width=3, children=3, budget=16)
TOKENS = 32
PROMPTS = prompts(6)


def plan(mask: int) -> Plan:
    return Plan(bin(mask), Mask(mask), DRAFTING, Cut("none"))


def on_gpu(models: tuple[Model, Model], dtype: str = "float32") -> tuple[Model, Model]:
    target, medium = (load_model(model.name, "cuda", dtype) for model in models)
    return target, medium


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_greedy_text_is_the_targets_and_every_shape_is_a_graph(pair, kind) -> None:  # type: ignore[no-untyped-def]
    target, medium = on_gpu(pair(kind))
    cache = PromptCache(target, medium)
    for prompt in PROMPTS:
        for mask in (0b000, 0b100, 0b011, 0b111):
            answer = decode(target, medium, prompt, plan(mask), TOKENS, cache=cache)
            assert same_text(target, prompt, answer.tokens, greedy(target, prompt, TOKENS))
    assert cache.drafter is not None
    for forward in (cache.verifier, cache.drafter.forward):
        assert len(forward.cache.captured) > 1
        assert all(held.graph is not None for held in forward.cache.captured.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_replayed_graph_gives_what_its_step_gives(pair, dtype, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    target, _ = on_gpu(pair("qwen3"), dtype)
    eager, replayed = TreeForward(target), TreeForward(target)
    rng = random.Random(0)
    committed = [rng.randrange(VOCABULARY) for _ in range(20)]
    root = Paths(3, committed, 6)
    for forward in (eager, replayed):
        forward(committed, root, [0])
        forward.commit([0])
    committed = [*committed, 3]
    for count in (1, 5, 12, 12):
        paths = Paths(rng.randrange(VOCABULARY), committed, 6)
        nodes = [0, *(paths.child(rng.randrange(i), rng.randrange(VOCABULARY)) for i in range(1, count))]
        with monkeypatch.context() as without:
            without.setattr(static, "replay", lambda step, inputs, cache: step(inputs))
            expected = eager(committed, paths, nodes)
        torch.testing.assert_close(replayed(committed, paths, nodes), expected)
        for forward in (eager, replayed):
            forward.commit([0])
        committed = [*committed, paths.tokens[0]]
    assert not eager.cache.captured and len(replayed.cache.captured) == 3


def test_a_later_text_captures_nothing_anew(pair, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    target, medium = on_gpu(pair("llama"))
    first = decode(target, medium, PROMPTS[3], plan(0b111), TOKENS)
    gc.collect()
    monkeypatch.setattr(static, "_capture", None)
    assert decode(target, medium, PROMPTS[3], plan(0b111), TOKENS).tokens == first.tokens


def test_the_host_waits_for_accepted_tokens_only(pair) -> None:  # type: ignore[no-untyped-def]
    target, _ = on_gpu(pair("llama"))
    decode(target, None, PROMPTS[3], plan(0b000), TOKENS)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            answer = decode(target, None, PROMPTS[3], plan(0b000), TOKENS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 1 + len(answer.rounds)


def test_a_model_that_no_graph_can_hold_decodes_without_and_says_so(tmp_path) -> None:  # type: ignore[no-untyped-def]
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    folder = save_lm(tmp_path, config("llama", rope_parameters=rope), 0)
    target = load_model(str(folder), "cuda")
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        answer = decode(target, None, PROMPTS[3], plan(0b000), TOKENS)
    assert same_text(target, PROMPTS[3], answer.tokens, greedy(target, PROMPTS[3], TOKENS))
