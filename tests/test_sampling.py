"""Sampled text depends on the seed and the target, never on the draft (spec section 3)."""

import math
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from joblib import Parallel, delayed
from scipy.stats import chisquare, kstest
from tiny import config, prompts, same_text, save_lm, save_noised

from treegraft.runtime.decode import AUTOREGRESSIVE, Plan, decode
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.models import Model, load_model
from treegraft.runtime.sampling import Chooser, gumbel
from treegraft.runtime.scheduler import Mask
from treegraft.runtime.size import Cut

DRAFTING = Drafting(depth=3, width=3, children=3, budget=16)
PLANS = [Plan(bin(mask), Mask(mask), DRAFTING, Cut("none")) for mask in (0b000, 0b111, 0b010)]
PROMPTS = prompts(6, seed=5)
TOKENS = 32
SEEDS = 20_000


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.8},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 8},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_one_seed_gives_one_text_under_every_schedule(pair, settings) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair("llama")
    accepted = 0
    for seed, prompt in enumerate(PROMPTS):
        chooser = Chooser.make(**settings, seed=seed)
        text = decode(target, None, prompt, AUTOREGRESSIVE, TOKENS, chooser).tokens
        assert len(text) == TOKENS
        for plan in PLANS:
            answer = decode(target, medium, prompt, plan, TOKENS, chooser)
            assert same_text(target, prompt, answer.tokens, text, chooser), plan.name
            accepted += sum(one.accepted for one in answer.rounds)
    assert accepted > 50


def test_seeds_give_different_texts(pair) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair("llama")
    texts = {
        tuple(decode(target, medium, PROMPTS[2], PLANS[1], TOKENS, Chooser.make(temperature=0.8, seed=seed)).tokens)
        for seed in range(6)
    }
    assert len(texts) == 6


def test_temperature_zero_is_greedy_whatever_the_seed(pair) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair("llama")
    texts = [
        decode(target, medium, PROMPTS[2], PLANS[1], TOKENS, Chooser.make(0.0, seed=seed)).tokens for seed in (1, 2)
    ]
    assert texts[0] == texts[1] == decode(target, None, PROMPTS[2], AUTOREGRESSIVE, TOKENS).tokens


def test_top_k_one_is_greedy(pair) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair("llama")
    text = decode(target, medium, PROMPTS[2], PLANS[1], TOKENS, Chooser.make(1.0, top_k=1, seed=4)).tokens
    assert text == decode(target, None, PROMPTS[2], AUTOREGRESSIVE, TOKENS).tokens


def test_noise_is_a_function_of_seed_and_position_with_the_gumbel_distribution() -> None:
    assert np.array_equal(gumbel(3, 10, 50), gumbel(3, 10, 50))
    assert np.array_equal(gumbel(3, 10, 50)[:20], gumbel(3, 10, 20))  # one value per token id, whatever the vocabulary
    assert not np.array_equal(gumbel(3, 10, 50), gumbel(3, 11, 50))
    assert not np.array_equal(gumbel(3, 10, 50), gumbel(4, 10, 50))
    values = np.concatenate([gumbel(seed, position, 100) for seed in range(20) for position in range(20)])
    assert values.dtype == np.float32 and np.isfinite(values).all()
    assert kstest(values, "gumbel_r").pvalue > 1e-3


@pytest.fixture(scope="module")
def smallest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target` and `medium`, tiny enough to decode with tens of thousands of seeds."""
    folder = tmp_path_factory.mktemp("smallest")
    settings = config("gpt2", size=12, hidden=16, layers=1, num_attention_heads=1)
    target = load_model(str(save_lm(folder / "target", settings, seed=7, scale=1.5)))
    save_noised(folder / "medium", target, noise=0.1, seed=8)
    return folder


def sample_triples(folder: Path, prompt: list[int], temperature: float, seeds: range) -> tuple[Counter, int]:  # type: ignore[type-arg]
    """How often each triple of tokens follows `prompt` when decoded with the medium drafter, and tokens accepted."""
    torch.set_num_threads(1)
    target, medium = load_model(str(folder / "target")), load_model(str(folder / "medium"))
    plan = Plan("medium", Mask(0b11), Drafting(depth=2, width=2, children=2, budget=6), Cut("none"))
    seen, accepted = Counter(), 0
    for seed in seeds:
        answer = decode(target, medium, prompt, plan, 3, Chooser.make(temperature, seed=seed))
        seen[tuple(answer.tokens)] += 1
        accepted += sum(one.accepted for one in answer.rounds)
    return seen, accepted


def exact_triples(target: Model, prompt: list[int], temperature: float) -> dict[tuple[int, ...], float]:
    """The exact distribution of the three tokens after `prompt`, from plain float64 arithmetic on the logits."""
    size = target.lm.config.vocab_size
    pairs = torch.tensor([prompt + list(pair) for pair in product(range(size), repeat=2)])
    with torch.inference_mode():
        logits = target.lm(pairs, use_cache=False).logits.double() / temperature
    log_p = torch.log_softmax(logits[:, len(prompt) - 1 :], dim=-1).numpy()
    exact = {}
    for row, (first, second) in enumerate(product(range(size), repeat=2)):
        for third in range(size):
            exact[first, second, third] = math.exp(log_p[row, 0, first] + log_p[row, 1, second] + log_p[row, 2, third])
    return exact


def test_sampled_text_has_exactly_the_targets_distribution(smallest) -> None:  # type: ignore[no-untyped-def]
    prompt, temperature = [4, 7], 0.8
    exact = exact_triples(load_model(str(smallest / "target")), prompt, temperature)
    assert abs(sum(exact.values()) - 1) < 1e-9
    halves = [range(SEEDS // 2), range(SEEDS // 2, SEEDS)]
    parts = Parallel(n_jobs=2)(delayed(sample_triples)(smallest, prompt, temperature, half) for half in halves)
    seen = sum((part for part, _ in parts), Counter())
    assert sum(accepted for _, accepted in parts) > SEEDS  # most of these tokens were drafted, not just bonus tokens
    # Triples expected fewer than 10 times share one bin.
    common = [triple for triple, p in exact.items() if p * SEEDS >= 10]
    observed = [seen[triple] for triple in common]
    expected = [exact[triple] * SEEDS for triple in common]
    observed.append(SEEDS - sum(observed))
    expected.append(SEEDS - sum(expected))
    assert len(common) > 50
    assert chisquare(observed, expected).pvalue > 1e-4
    wrong = np.roll(expected, 1)
    assert chisquare(observed, wrong).pvalue < 1e-4  # the test can tell
