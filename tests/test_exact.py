"""In bfloat16 and float16 every schedule writes, bit for bit, what the one-token loop writes in that precision."""

import copy
import random
import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tiny import ARCHITECTURES, VOCABULARY, noised, prompts, random_lm, tokenizer
from torch import nn

from treegraft import bench
from treegraft.collect.collector import collect
from treegraft.collect.worker import Sampling, blocks
from treegraft.data.log import read_log
from treegraft.data.prompts import Prompt
from treegraft.runtime import attention, exact, models
from treegraft.runtime import forward as forwarding
from treegraft.runtime.attention import BLOCK
from treegraft.runtime.decode import AUTOREGRESSIVE, Plan, PromptCache, decode
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.forward import TreeForward
from treegraft.runtime.latency import LatencyProfile
from treegraft.runtime.models import Model, wrap_model
from treegraft.runtime.sampling import Chooser
from treegraft.runtime.scheduler import Mask
from treegraft.runtime.size import Cut
from treegraft.runtime.tree import Paths
from treegraft.value_system.replay import replay

DTYPES = (torch.bfloat16, torch.float16)
DRAFTING = Drafting(depth=3, width=3, children=3, budget=16)
FLAT = LatencyProfile.what_if(0.3)
PROMPTS = prompts(6, seed=8)[3:5]
OTHERS = ("gemma", "phi3", "starcoder2", "olmo2", "stablelm")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 1024}  # fmt: skip


def plan(mask: int, drafting: Drafting = DRAFTING) -> Plan:
    return Plan(bin(mask), Mask(mask), drafting, Cut("none"))


@cache
def pair_of(kind: str, dtype: torch.dtype) -> tuple[Model, Model]:
    """A tiny target and its drafter in one precision."""
    lm = random_lm(kind, **SIZES, **({"head_dim": 16} if kind == "gemma" else {}))
    return tuple(replace(wrap_model(one.to(dtype)), tokenizer=tokenizer()) for one in (lm, noised(lm)))  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [*ARCHITECTURES, *OTHERS])
def test_every_schedule_writes_the_one_token_loops_text(kind: str, dtype: torch.dtype) -> None:
    target, medium = pair_of(kind, dtype)
    accepted = 0
    for prompt, chooser in zip(PROMPTS, (None, Chooser.make(temperature=1.0, seed=5))):
        reference = decode(target, None, prompt, AUTOREGRESSIVE, 40, chooser).tokens
        for mask in range(1 << DRAFTING.depth):
            decoded = decode(target, medium, prompt, plan(mask), 40, chooser)
            assert decoded.tokens == reference
            accepted += sum(one.accepted for one in decoded.rounds)
    assert accepted > 20


def path_of(paths: Paths, path: int) -> list[int]:
    """The paths from the root to one."""
    found = []
    while path >= 0:
        found.append(path)
        path = paths.parents[path]
    return found[::-1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_a_tokens_bits_are_those_of_one_token_steps_whatever_tree_it_came_in(kind: str, dtype: torch.dtype) -> None:
    """Every node of random trees, deep and wide, near and past a block's end, beyond the kernel's 512 keys."""
    model, _ = pair_of(kind, dtype)
    rng = random.Random(3)
    for length in (1, 14, 15, 16, 31, 33, 130, 509, 700):
        committed = [rng.randrange(VOCABULARY) for _ in range(length)]
        paths = Paths(rng.randrange(VOCABULARY), committed, 6)
        for depth in range(BLOCK):  # one path as deep as any
            paths.child(depth, rng.randrange(6))
        for _ in range(12):
            paths.child(rng.randrange(BLOCK), 6 + rng.randrange(6))
        nodes = list(range(len(paths.tokens)))
        whole, parts = TreeForward(model), TreeForward(model)
        logits = whole(committed, paths, nodes)
        cut = rng.randrange(1, len(nodes))
        assert torch.equal(
            torch.cat([parts(committed, paths, nodes[:cut]), parts(committed, paths, nodes[cut:])]), logits
        )
        for leaf in (nodes[BLOCK], nodes[-1], nodes[-2]):
            steps, text = TreeForward(model), list(committed)
            for node in path_of(paths, leaf):
                alone = Paths(paths.tokens[node], text, 6)
                assert torch.equal(steps(text, alone, [0])[0], logits[node]), (length, node)
                steps.commit([0])
                text.append(paths.tokens[node])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_long_lag_has_the_same_bits_in_any_pieces(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pair_of("llama", dtype)
    text = [random.Random(1).randrange(VOCABULARY) for _ in range(600)]
    at_once = TreeForward(model)(text[:-1], Paths(text[-1], text[:-1], 1), [0])
    forward = TreeForward(model)
    for end in (1, 30, 31, 400, 600):
        logits = forward(text[: end - 1], Paths(text[end - 1], text[: end - 1], 1), [0])
        forward.commit([0])
    assert torch.equal(logits, at_once)
    monkeypatch.setattr(forwarding, "PIECE", 7)
    assert torch.equal(TreeForward(model)(text[:-1], Paths(text[-1], text[:-1], 1), [0]), at_once)


def test_without_an_order_the_same_trees_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above rest on: these models, prompts and lengths show it where the order is not kept."""
    monkeypatch.setattr(forwarding, "can_order", lambda lm, dtype: False)
    with pytest.raises(AssertionError):
        test_a_tokens_bits_are_those_of_one_token_steps_whatever_tree_it_came_in("llama", torch.bfloat16)


def test_a_conversation_with_a_prompt_cache_is_the_one_token_loops() -> None:
    target, medium = pair_of("llama", torch.bfloat16)
    texts = []
    for one in (AUTOREGRESSIVE, plan(0b000), plan(0b010), plan(0b111)):
        kept, text = PromptCache(target, medium), list(PROMPTS[0])
        for turn in range(3):
            text += [*decode(target, medium, text, one, 20, cache=kept).tokens, turn, 7, 9]
        texts.append(text)
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("medium_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_replay_is_what_live_decoding_does(tmp_path, medium_dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair_of("llama", torch.bfloat16)[0], pair_of("llama", medium_dtype)[1]
    texts = [" ".join(f"t{token}" for token in prompt) for prompt in prompts(4, seed=8)]
    asked = [Prompt("tiny", str(i), text=text) for i, text in enumerate(texts)]
    collect(target, medium, asked, tmp_path, DRAFTING, Sampling(), 32)
    answers = read_log(tmp_path)[1]
    for mask in range(1 << DRAFTING.depth):
        replayed = replay(answers, Mask(mask), Cut("none"), FLAT, DRAFTING).trace
        for index, prompt in enumerate(asked):
            ids: Any = target.tokenizer(prompt.text)["input_ids"]
            live = decode(target, medium, ids, plan(mask), 32).rounds
            mine = replayed["answer"] == index
            for name in ("position", "lag", "mask", "kept", "accepted", "tokens"):
                assert replayed[name][mine].tolist() == [getattr(one, name) for one in live], name


def test_bench_holds_texts_against_the_one_token_loops() -> None:
    target, medium = pair_of("llama", torch.bfloat16)
    tokenizer = copy.deepcopy(target.tokenizer)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    asked = [Prompt("tiny", str(i), turns=(f"t{i} t{i + 1}", "t7 t9")) for i in range(4)]
    records, failed = bench.run(replace(target, tokenizer=tokenizer), medium, asked, [plan(0b000), plan(0b011)], 40)
    ours = [record for record in records if record.schedule != bench.GENERATE.name]
    assert not failed and not any(record.different or record.ties or record.unconfirmed for record in ours)
    # It is not in vain: `generate`, which sums in another order, parts somewhere.
    assert any(record.different + record.ties for record in records)


def test_positions_far_apart_share_no_forward_where_a_path_may_be_no_deeper() -> None:
    positions = [0, 1, 2, 9, 12, 40, 41, 90]
    assert list(blocks(positions, None)) == [positions]
    assert list(blocks(positions, 10)) == [[0, 1, 2, 9], [12], [40, 41], [90]]
    assert list(blocks(list(range(40)), 100)) == [list(range(16)), list(range(16, 32)), list(range(32, 40))]


def test_a_machine_that_keeps_no_order_says_so_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = pair_of("llama", torch.bfloat16)[0].lm
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrap_model(lm)
    # Once a setting: not at every text, as of `custom_generate`.
    check = exact.check_rounding
    monkeypatch.setattr(models, "check_rounding", lambda *_: pytest.fail("checked again"))
    wrap_model(lm)
    monkeypatch.setattr(models, "check_rounding", check)
    monkeypatch.setattr(models, "check_branching", lambda *_: True)
    product = nn.functional.linear

    def by_rows(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """As a library may: single rows with another rounding."""
        made = product(rows, weight, bias)
        return made if rows.shape[0] > 1 else product(rows * 1.01, weight, bias)

    monkeypatch.setattr(nn.functional, "linear", by_rows)
    with pytest.warns(UserWarning, match=r"in torch.bfloat16 .*\(a product with 64 x 64 weights, .*differ by schedule"):
        wrap_model(lm)
    monkeypatch.undo()
    monkeypatch.setattr(models, "check_branching", lambda *_: True)
    monkeypatch.setattr(exact, "can_order", lambda lm, dtype: False)
    with pytest.warns(UserWarning, match="attention, whose order of sums is kept on a CPU only"):
        wrap_model(lm)
    monkeypatch.undo()
    monkeypatch.setattr(models, "check_branching", lambda *_: True)
    exact._attention_keeps.cache_clear()
    attend = attention._attend

    def by_calls(query: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output, sums = attend(query, *rest)
        return output * (1.01 if len(query) > 4 else 1.0), sums

    monkeypatch.setattr(attention, "_attend", by_calls)
    with pytest.warns(UserWarning, match=r"by the tokens of a forward \(attention\)"):
        wrap_model(lm)
    exact._attention_keeps.cache_clear()
