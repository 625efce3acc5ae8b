"""No token is chosen by scores that are no numbers, and what no text needs may hold them."""

import copy
from dataclasses import replace
from pathlib import Path
from statistics import mode
from typing import Any

import pytest
import torch
from tiny import VOCABULARY, config, greedy, prompts, same_text, save_lm, save_noised

import treegraft
from treegraft.collect.collector import collect
from treegraft.collect.positions import Positions
from treegraft.collect.worker import Sampling
from treegraft.data.prompts import Prompt
from treegraft.runtime import static
from treegraft.runtime.decode import AUTOREGRESSIVE, Plan, PromptCache, decode
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.models import Model, load_model
from treegraft.runtime.sampling import Chooser, ScoreError
from treegraft.runtime.scheduler import Mask
from treegraft.runtime.size import Cut

DRAFTING = Drafting(depth=2, width=3, children=3, budget=12)
MASKS = range(1 << DRAFTING.depth)
PROMPTS = [[token for token in prompt if token != 7] or [8] for prompt in prompts(4)[1:]]
TOKENS = 16
WAYS = [
    {},
    {"temperature": 0.8, "seed": 1},
    {"repetition_penalty": 1.3},
    {"temperature": 1.0, "top_k": 9, "top_p": 0.9},
]
BAD = 7  # a token that overflows


def plan(mask: int) -> Plan:
    return Plan(bin(mask), Mask(mask), DRAFTING, Cut("none"))


def copied(model: Model) -> Model:
    return replace(model, lm=copy.deepcopy(model.lm))


def scoring(model: Model, value: float, tokens: list[int]) -> Model:
    """A copy of `model` that scores `tokens` with `value`, whatever the text."""
    changed, at = copied(model), torch.tensor(tokens)
    head: Any = changed.lm.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, logits: logits.index_fill(-1, at, value))
    return changed


@pytest.fixture(scope="module")
def overflowing(pair) -> tuple[Model, Model, Model]:
    """A sound target that never chooses BAD, the same with NaNs where it reads it, and a drafter that is fond of it."""
    target, medium = (copied(model) for model in pair("llama"))
    with torch.no_grad():
        target.lm.get_output_embeddings().weight[BAD] = 0
        broken = copied(target)
        broken.lm.get_input_embeddings().weight[BAD] = torch.nan
        head = medium.lm.get_output_embeddings().weight
        head[BAD] = head[3] * 3
    return target, broken, medium


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("value, said", [(torch.nan, "hold a NaN"), (-torch.inf, "are all -inf")], ids=str)
def test_a_target_without_numbers_is_named_with_its_dtype(pair, way: dict[str, Any], value: float, said: str) -> None:
    target, medium = pair("llama")
    broken = scoring(target, value, list(range(VOCABULARY)))
    for mask in (0b00, 0b11):
        with pytest.raises(ScoreError, match=f"{said} in float32; load it in another dtype"):
            decode(broken, medium, PROMPTS[2], plan(mask), TOKENS, Chooser.make(**way))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_one_nan_among_numbers_is_enough(pair, way: dict[str, Any]) -> None:
    target, _ = pair("llama")
    broken = scoring(target, torch.nan, [3])
    with pytest.raises(ScoreError, match="NaN in float32"):
        decode(broken, None, PROMPTS[2], AUTOREGRESSIVE, TOKENS, Chooser.make(**way))


def test_float16_that_overflows_is_refused_where_float32_decodes(tmp_path: Path) -> None:
    target = load_model(str(save_lm(tmp_path / "sound", config("llama"), 0)))
    with torch.no_grad():
        for layer in target.lm.model.layers:
            layer.mlp.up_proj.weight *= 300
            layer.mlp.down_proj.weight *= 300
    save_noised(tmp_path / "loud", target, 0.0, 0)
    loud = str(tmp_path / "loud")
    assert len(treegraft.Decoder(loud).generate(PROMPTS[2], 4).tokens) == 4
    for way in WAYS:
        with pytest.raises(ValueError, match=r"in float16; .*bfloat16 and float32"):
            treegraft.Decoder(loud, dtype="float16").generate(PROMPTS[2], 4, **way)


def test_a_temperature_that_leaves_no_numbers_is_named(pair) -> None:
    target, medium = pair("llama")
    with pytest.raises(ScoreError, match="numbers in float32, but hold an infinity after temperature 1e-40"):
        treegraft.Decoder(target, medium, "medium").generate(PROMPTS[2], 4, temperature=1e-40)


def test_a_processor_that_forbids_everything_is_named(pair) -> None:
    target, _ = pair("llama")
    chooser = Chooser.make()
    chooser.processors.append(lambda ids, scores: scores.fill_(-torch.inf))
    with pytest.raises(ScoreError, match=r"all -inf after function.*a token that may be chosen"):
        decode(target, None, PROMPTS[2], AUTOREGRESSIVE, 4, chooser)


def test_transformers_generate_raises_too(pair) -> None:
    target, medium = pair("llama")
    broken = scoring(target, torch.nan, [3])
    ids = torch.tensor([PROMPTS[2]])
    for sampled in (False, True):
        with pytest.raises(ScoreError, match="NaN in float32"):
            broken.lm.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=sampled, max_new_tokens=4,
                custom_generate=treegraft.generate, medium=medium, schedule="medium",
            )  # fmt: skip


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_one_infinite_score_is_a_score(pair, value: float) -> None:
    target, medium = pair("llama")
    masked = scoring(target, value, [3])
    for mask in MASKS:
        text = decode(masked, medium, PROMPTS[2], plan(mask), TOKENS).tokens
        assert same_text(masked, PROMPTS[2], text, greedy(masked, PROMPTS[2], TOKENS))
        assert (3 in text) == (value > 0)
    if value > 0:  # of which no distribution can be made
        with pytest.raises(ScoreError, match="hold an infinity in float32"):
            decode(masked, medium, PROMPTS[2], plan(0), TOKENS, Chooser.make(1.0))


@pytest.mark.parametrize("devices", [(), ("cpu",)], ids=["plain", "padded"])
def test_a_drafted_token_that_overflows_costs_no_text(overflowing, devices: Any, monkeypatch) -> None:
    target, broken, medium = overflowing
    monkeypatch.setattr(static, "DEVICES", devices)
    drafted = 0

    def watch(tree: Any, kept: list[int], accepted: list[int]) -> None:
        nonlocal drafted
        drafted += BAD in tree.token

    for prompt in PROMPTS:
        for mask in MASKS:
            for way in WAYS[:2]:
                text = decode(target, None, prompt, AUTOREGRESSIVE, TOKENS, Chooser.make(**way)).tokens
                answer = decode(broken, medium, prompt, plan(mask), TOKENS, Chooser.make(**way), on_tree=watch)
                assert same_text(target, prompt, answer.tokens, text, Chooser.make(**way))
    assert drafted > 20


@pytest.mark.parametrize("devices", [(), ("cpu",)], ids=["plain", "padded"])
def test_a_text_without_numbers_harms_no_later_one(overflowing, devices: Any, monkeypatch) -> None:
    target, broken, medium = overflowing
    monkeypatch.setattr(static, "DEVICES", devices)
    for cache in (None, PromptCache(broken, medium)):
        for prompt in PROMPTS:
            with pytest.raises(ScoreError):
                decode(broken, medium, [*prompt, BAD, 9], plan(0b11), TOKENS, cache=cache)
            answer = decode(broken, medium, prompt, plan(0b11), TOKENS, cache=cache)
            assert same_text(target, prompt, answer.tokens, greedy(target, prompt, TOKENS))


@pytest.mark.parametrize("devices", [(), ("cpu",)], ids=["plain", "padded"])
@pytest.mark.parametrize("where", ["everywhere", "after one token", "in one score"])
def test_a_drafter_without_numbers_drafts_nothing_and_harms_no_text(
    pair, where: str, devices: Any, monkeypatch
) -> None:
    target, sound = pair("llama")
    medium = copied(sound)
    monkeypatch.setattr(static, "DEVICES", devices)
    common = mode(token for prompt in PROMPTS for token in greedy(target, prompt, TOKENS))
    with torch.no_grad():
        if where == "after one token":
            medium.lm.get_input_embeddings().weight[common] = torch.nan
        else:
            medium.lm.get_output_embeddings().weight[slice(None) if where == "everywhere" else 5] = torch.nan
    proposed = 0

    def watch(tree: Any, kept: list[int], accepted: list[int]) -> None:
        nonlocal proposed
        proposed += tree.proposers.count("medium")
        assert all(value <= 0 for value in tree.log_s)

    for prompt in PROMPTS:
        for mask in MASKS:
            answer = decode(target, medium, prompt, plan(mask), TOKENS, on_tree=watch)
            assert same_text(target, prompt, answer.tokens, greedy(target, prompt, TOKENS))
    assert (proposed > 20) == (where == "after one token")


def test_a_prompt_without_numbers_fails_alone_in_a_log(overflowing, tmp_path: Path) -> None:
    _, broken, medium = overflowing
    asked = [Prompt("asked", str(i), text=text) for i, text in enumerate(("t5 t6", f"t5 t{BAD} t6", "t8 t9"))]
    manifest, failed = collect(broken, medium, asked, tmp_path, DRAFTING, Sampling(), 8, Positions())
    assert [part["prompt"] for part in manifest["parts"]] == ["0", "2"]
    assert [failure["prompt"] for failure in failed] == ["1"]
    assert failed[0]["error"].startswith("no token can be chosen after 3 tokens") and "float32" in failed[0]["error"]
