"""A pair of one tokenizer may embed different numbers of ids: neither model meets an id that it does not embed."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import VOCABULARY, config, greedy, prompts, same_text, save_lm, tokenizer
from transformers import AutoModelForCausalLM

import treegraft
from treegraft.collect.collector import collect
from treegraft.collect.worker import Sampling
from treegraft.data.prompts import Prompt
from treegraft.runtime import static
from treegraft.runtime.decode import Plan, decode
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.models import Model, ModelError, check_pair, load_model, wrap_model
from treegraft.runtime.scheduler import Mask
from treegraft.runtime.size import Cut

DRAFTING = Drafting(depth=2, width=3, children=3, budget=12)
MASKS = range(1 << DRAFTING.depth)
PADDED = VOCABULARY + 40
TOKENS = 16
SIZES = [(PADDED, VOCABULARY), (VOCABULARY, PADDED), (PADDED, VOCABULARY + 8)]


def plan(mask: int) -> Plan:
    return Plan(bin(mask), Mask(mask), DRAFTING, Cut("none"))


def save_resized(folder: Path, source: Model, size: int, noise: float = 0.0) -> str:
    """Write `source`, with noise as `save_noised` adds it, as one of `size` embeddings and head rows."""
    torch.manual_seed(size)
    lm = copy.deepcopy(source.lm)
    with torch.no_grad():
        for weight in lm.parameters():
            weight += noise * weight.std() * torch.randn(weight.shape) if weight.dim() > 1 else 0
        old = [lm.get_input_embeddings().weight, lm.get_output_embeddings().weight]
        lm.resize_token_embeddings(size, mean_resizing=False)
        for before, after in zip(old, (lm.get_input_embeddings().weight, lm.get_output_embeddings().weight)):
            after[len(before) :] = before[3 : 3 + max(0, size - len(before))].flip(-1)
    lm.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=SIZES, ids=str)
def padded(request, pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    """A target and its drafter with the numbers of embeddings of `request.param`, and one tokenizer of 200 tokens."""
    folder = tmp_path_factory.mktemp("padded")
    ours, theirs = request.param
    target = load_model(save_resized(folder / "target", pair("llama")[0], ours))
    return target, load_model(save_resized(folder / "medium", target, theirs, noise=0.06))


def asked(target: Model) -> list[list[int]]:
    """Prompts with ids of all that the target embeds, the last among them."""
    return [*prompts(3, size=target.embeds), [5, target.embeds - 1, 6, target.embeds - 1]]


def test_it_is_a_pair_and_neither_model_is_changed(padded) -> None:
    target, medium = padded
    before = medium.lm.get_output_embeddings()
    check_pair(target, medium)
    assert medium.draft_vocabulary is None and medium.lm.get_output_embeddings() is before
    assert before.weight.shape[0] == medium.embeds


@pytest.mark.parametrize("devices", [(), ("cpu",)], ids=["plain", "padded"])
def test_the_text_is_the_targets_under_every_schedule(padded, devices: Any, monkeypatch) -> None:
    target, medium = padded
    monkeypatch.setattr(static, "DEVICES", devices)
    accepted, gap = 0, 0

    def watch(tree: Any, kept: list[int], nodes: list[int]) -> None:
        assert max(tree.token) < target.embeds

    for prompt in asked(target):
        reference = greedy(target, prompt, TOKENS)
        gap += max(reference) >= medium.embeds
        for mask in MASKS:
            answer = decode(target, medium, prompt, plan(mask), TOKENS, on_tree=watch)
            assert same_text(target, prompt, answer.tokens, reference)
            accepted += sum(done.accepted for done in answer.rounds)
    assert accepted > 20
    assert (gap > 0) == (target.embeds > medium.embeds)  # ids that only the target embeds are in answers too


def test_a_decoder_serves_it_by_name(padded) -> None:
    target, medium = padded
    decoder = treegraft.Decoder(target.name, medium.name, "medium")
    for prompt in asked(target):
        assert same_text(target, prompt, decoder.generate(prompt, TOKENS).tokens, greedy(target, prompt, TOKENS))


def test_transformers_generate_takes_either_kind_of_drafter_and_leaves_it_as_it_is(padded) -> None:
    target, medium = padded
    for drafter in (medium, medium.lm):
        for prompt in asked(target):
            ids = torch.tensor([prompt])
            made = target.lm.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS,
                custom_generate=treegraft.generate, medium=drafter, schedule="medium",
            )  # fmt: skip
            assert same_text(target, prompt, made[0, len(prompt) :].tolist(), greedy(target, prompt, TOKENS))
    assert medium.lm(torch.tensor([[5]])).logits.shape[-1] == medium.embeds


def test_it_is_collected_with(padded, tmp_path: Path) -> None:
    target, medium = padded
    words = [Prompt("asked", str(i), text=f"t{i} t{i + 3} t{i}") for i in range(3)]
    manifest, failed = collect(target, medium, words, tmp_path, DRAFTING, Sampling(), TOKENS)
    assert len(manifest["parts"]) == 3 and not failed


def test_a_reduced_draft_vocabulary_is_cut_too(pair, tmp_path: Path) -> None:
    target = load_model(save_resized(tmp_path / "target", pair("llama")[0], VOCABULARY - 10))
    folder = save_resized(tmp_path / "medium", pair("llama")[0], VOCABULARY)
    (tmp_path / "medium" / "draft_vocabulary.json").write_text(json.dumps(list(range(0, VOCABULARY, 2))))
    medium = load_model(folder)
    proposed: set[int] = set()
    for prompt in asked(target):
        answer = decode(
            target, medium, prompt, plan(0b11), TOKENS, on_tree=lambda tree, *_: proposed.update(tree.token)
        )
        assert same_text(target, prompt, answer.tokens, greedy(target, prompt, TOKENS))
    assert max(proposed) < target.embeds and len(proposed) > 20


@pytest.fixture(scope="module")
def of_size() -> Any:
    """of_size(n): a tiny model in memory that embeds n ids."""
    made: dict[int, Model] = {}

    def get(size: int) -> Model:
        if size not in made:
            torch.manual_seed(size)
            lm = AutoModelForCausalLM.from_config(config("llama", size=size, hidden=16, layers=1))
            made[size] = wrap_model(lm.eval())
        return made[size]

    return get


@settings(max_examples=40, deadline=None)
@given(st.integers(8, 14), st.integers(8, 14), st.integers(0, 3), st.data())
def test_any_sizes_and_any_prompt_give_the_targets_text(of_size, ours: int, theirs: int, mask: int, data: Any) -> None:
    target, medium = of_size(ours), of_size(theirs)
    check_pair(target, medium)
    prompt = data.draw(st.lists(st.integers(0, ours - 1), min_size=1, max_size=12))
    answer = decode(target, medium, prompt, plan(mask), 10)
    assert same_text(target, prompt, answer.tokens, greedy(target, prompt, 10))


def test_sizes_that_no_padding_explains_are_refused_where_there_is_no_tokenizer_to_compare_by(of_size) -> None:
    with pytest.raises(ModelError, match=r"embeds 8 tokens and drafter .* 17: .*do not share a vocabulary"):
        check_pair(of_size(8), of_size(17))


def test_a_target_without_a_tokenizer_has_no_texts_to_decode(of_size) -> None:
    with pytest.raises(ModelError, match="no tokenizer"):
        treegraft.Decoder(of_size(8))


def test_the_tokenizers_are_compared_whatever_the_sizes(pair, tmp_path: Path) -> None:
    target, _ = pair("llama")
    other = load_model(str(save_lm(tmp_path, config("llama", layers=1), 0, swap=(3, 4))))
    with pytest.raises(ModelError, match="2 tokens differ"):
        check_pair(target, other)
