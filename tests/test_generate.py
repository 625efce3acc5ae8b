"""`treegraft.generate` inside transformers' `generate`: what a caller of assisted generation may rely on."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import Any

import artifacts
import pytest
import torch
from tiny import ARCHITECTURES, VOCABULARY, config, prompts, same_text, save_lm
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TextIteratorStreamer,
)

import treegraft
from treegraft.collect.fork import leaf_facts
from treegraft.runtime.decode import Plan, decode_rounds
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.models import Model, load_model
from treegraft.runtime.sampling import gumbel
from treegraft.runtime.scheduler import Mask
from treegraft.runtime.size import Cut

TOKENS = 16
PROMPTS = prompts(4, seed=3)
SCHEDULES = ("small", "0b00011")


def ask(prompt: list[int], **options: Any) -> dict[str, Any]:
    """Keywords of `model.generate` for one prompt."""
    ids = torch.tensor([prompt])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": TOKENS, "do_sample": False} | (
        options
    )


def ours(target: Model, medium: Model | None, prompt: list[int], schedule: Any = "0b00011", **options: Any) -> Any:
    return target.lm.generate(
        **ask(prompt, **options), custom_generate=treegraft.generate, medium=medium, schedule=schedule
    )


def theirs(target: Model, prompt: list[int], **options: Any) -> Any:
    return target.lm.generate(**ask(prompt, **options))


def answer(output: torch.Tensor, prompt: list[int]) -> list[int]:
    assert output.shape[0] == 1 and output[0, : len(prompt)].tolist() == prompt
    return output[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def letters() -> PreTrainedTokenizerFast:
    """A tokenizer whose 200 tokens are letters and pairs of letters, so that stop strings cross and divide tokens."""
    alphabet = [chr(ord("a") + i) for i in range(26)]
    words = (alphabet + [first + second for first in alphabet for second in alphabet])[:VOCABULARY]
    inner = Tokenizer(BPE({word: token for token, word in enumerate(words)}, merges=[]))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


# The text


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_greedy_ids_are_those_of_transformers(pair, kind: str) -> None:
    target, medium = pair(kind)
    accepted = 0
    for prompt in PROMPTS:
        reference = answer(theirs(target, prompt), prompt)
        for schedule in ("small", "medium"):
            output = ours(target, medium, prompt, schedule, return_dict_in_generate=True)
            assert same_text(target, prompt, answer(output.sequences, prompt), reference)
            accepted += sum(done.accepted for done in output.decoded.rounds)
    assert accepted > 20


def test_the_medium_drafter_may_be_a_plain_transformers_model_or_absent(pair) -> None:
    target, medium = pair("llama")
    reference = theirs(target, PROMPTS[3])
    assert torch.equal(ours(target, medium.lm, PROMPTS[3]), reference)
    assert torch.equal(ours(target, None, PROMPTS[3], "small"), reference)
    assert torch.equal(target.lm.generate(**ask(PROMPTS[3]), custom_generate=treegraft.generate), reference)


class Forbid(LogitsProcessor):
    """Forbids odd tokens, writing in place as users' processors do."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 1::2] = -torch.inf
        return scores


GREEDY: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"no_repeat_ngram_size": 1},
    {"bad_words_ids": [[token] for token in range(0, 120)]},
    {"suppress_tokens": list(range(0, 120))},
    {"begin_suppress_tokens": list(range(0, 190))},
    {"sequence_bias": [[[token], 5.0] for token in range(0, 200, 3)]},
    {"forced_eos_token_id": 7},
    {"exponential_decay_length_penalty": (2, 3.0), "eos_token_id": 7, "pad_token_id": 0},
    {"min_new_tokens": 9, "eos_token_id": list(range(100)), "pad_token_id": 0},
    {"min_length": 14, "eos_token_id": list(range(100)), "pad_token_id": 0},
    {"guidance_scale": 1.5},
    {"renormalize_logits": True, "repetition_penalty": 1.4},
    {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(int(ids[-1]) % 7, 200, 7))},
    {"logits_processor": LogitsProcessorList([Forbid()])},
]


@pytest.mark.parametrize("settings", GREEDY, ids=lambda settings: next(iter(settings)))
def test_every_logits_processor_acts_as_in_transformers(pair, settings: dict[str, Any]) -> None:
    target, medium = pair("qwen3")
    reference = theirs(target, PROMPTS[3], **settings)
    for schedule in SCHEDULES:
        assert torch.equal(ours(target, medium, PROMPTS[3], schedule, **settings), reference)
    assert not torch.equal(reference, theirs(target, PROMPTS[3]))


def test_a_generation_config_and_the_models_own_are_honoured(pair) -> None:
    target, medium = pair("llama")
    wanted = GenerationConfig(max_new_tokens=13, do_sample=False, repetition_penalty=1.5)
    bare = {"input_ids": torch.tensor([PROMPTS[3]]), "attention_mask": torch.ones(1, len(PROMPTS[3]), dtype=torch.long)}
    reference = target.lm.generate(**bare, generation_config=wanted)
    chosen = {"custom_generate": treegraft.generate, "medium": medium, "schedule": "0b00011"}
    assert torch.equal(target.lm.generate(**bare, generation_config=wanted, **chosen), reference)
    own = copy.copy(target.lm)
    own.generation_config = wanted
    assert torch.equal(own.generate(**bare, **chosen), reference)


class Watching(LogitsProcessor):
    """Remembers the length of every text that it was given."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        return scores


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stateful_processor_sees_each_token_once_in_order_and_none_after_the_end(pair, schedule: str) -> None:
    target, medium = pair("llama")
    for prompt in PROMPTS[2:]:
        end = answer(theirs(target, prompt), prompt)[11]
        watching = Watching()
        ends = {"eos_token_id": end, "pad_token_id": 0}
        output = ours(target, medium, prompt, schedule, logits_processor=LogitsProcessorList([watching]), **ends)
        assert watching.lengths == list(range(len(prompt), output.shape[1]))


# Sampling

SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_k": 0},
    {"top_k": 5},
    {"top_p": 0.8, "top_k": 0},
    {"min_p": 0.1},
    {"typical_p": 0.6},
    {"epsilon_cutoff": 0.01},
    {"eta_cutoff": 0.01},
    {"top_h": 0.5},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize("settings", SAMPLED, ids=str)
def test_samples_are_drawn_from_transformers_own_scores(pair, settings: dict[str, Any]) -> None:
    target, medium = pair("llama")
    prompt, rows = PROMPTS[3], {"return_dict_in_generate": True, "output_scores": True, "do_sample": True}
    outputs = [ours(target, medium, prompt, schedule, **rows, **settings, seed=5) for schedule in SCHEDULES]
    for output in outputs:
        assert torch.equal(output.sequences, outputs[0].sequences)
        torch.testing.assert_close(output.scores[0], theirs(target, prompt, **rows, **settings).scores[0])
        for place, (row, token) in enumerate(zip(output.scores, answer(output.sequences, prompt), strict=True)):
            noise = torch.from_numpy(gumbel(5, len(prompt) + place, VOCABULARY))
            assert int((row[0].log_softmax(-1) + noise).argmax()) == token


def test_the_seed_is_torchs_unless_it_is_given(pair) -> None:
    target, medium = pair("llama")
    sample = partial(ours, target, medium, PROMPTS[3], do_sample=True, top_k=0)

    def seeded(torchs: int, **options: Any) -> list[int]:
        torch.manual_seed(torchs)
        return sample(**options)[0].tolist()

    assert seeded(1) == seeded(1) != seeded(2)
    assert seeded(1, seed=3) == seeded(2, seed=3) != seeded(1, seed=4)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    ours(target, medium, PROMPTS[3])
    assert torch.equal(torch.get_rng_state(), before)  # greedy draws nothing


# What comes back


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.3}], ids=str)
def test_scores_and_logits_have_a_row_a_token_as_in_transformers(pair, settings: dict[str, Any]) -> None:
    target, medium = pair("gpt_neox")
    end = answer(theirs(target, PROMPTS[3], **settings), PROMPTS[3])[10]
    options = {"return_dict_in_generate": True, "eos_token_id": end, "pad_token_id": 0, **settings}
    expected = theirs(target, PROMPTS[3], output_scores=True, output_logits=True, **options)
    for schedule in SCHEDULES:
        output = ours(target, medium, PROMPTS[3], schedule, output_scores=True, output_logits=True, **options)
        assert torch.equal(output.sequences, expected.sequences)
        for name in ("scores", "logits"):
            torch.testing.assert_close(getattr(output, name), getattr(expected, name), atol=1e-4, rtol=1e-4)
        transitions = target.lm.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
        assert transitions.shape == (1, len(expected.scores))
    plain = ours(target, medium, PROMPTS[3], **options)
    assert plain.scores is None and plain.logits is None
    assert plain.decoded.tokens == answer(expected.sequences, PROMPTS[3])


class Listener:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.heard: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.heard.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_gets_the_prompt_then_each_token_then_the_end(pair) -> None:
    target, medium = pair("llama")
    for prompt in PROMPTS[2:]:
        expected, listener = Listener(), Listener()
        reference = theirs(target, prompt, streamer=expected)
        assert torch.equal(ours(target, medium, prompt, streamer=listener), reference)
        assert listener.heard == expected.heard and listener.ended == 1


def test_a_text_iterator_streamer_yields_the_text(pair) -> None:
    target, medium = pair("llama")
    streamer = TextIteratorStreamer(target.tokenizer, skip_prompt=True, timeout=60)
    thread = Thread(target=ours, args=(target, medium, PROMPTS[3]), kwargs={"streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == target.tokenizer.decode(answer(theirs(target, PROMPTS[3]), PROMPTS[3]))


# Where the answer ends


def test_it_ends_with_any_end_of_sequence_wherever_that_falls(pair) -> None:
    target, medium = pair("mistral")
    lengths = set()
    for prompt in PROMPTS[2:]:
        text = answer(theirs(target, prompt), prompt)
        for ends in (text[0], text[5], [text[9], text[12]]):
            options = {"eos_token_id": ends, "pad_token_id": 0}
            reference = theirs(target, prompt, **options)
            lengths.add(reference.shape[1] - len(prompt))
            for schedule in SCHEDULES:
                assert torch.equal(ours(target, medium, prompt, schedule, **options), reference)
    assert len(lengths) > 2 and max(lengths) < TOKENS


@pytest.mark.parametrize(
    "length", [{"max_new_tokens": 1}, {"max_new_tokens": 6}, {"max_new_tokens": None, "max_length": 30}, {}], ids=str
)
def test_it_has_the_length_asked_for(pair, length: dict[str, Any]) -> None:
    target, medium = pair("llama")
    for prompt in PROMPTS[1:3]:
        reference = theirs(target, prompt, **length)
        assert torch.equal(ours(target, medium, prompt, **length), reference)
    assert reference.shape[1] == length.get("max_length", len(prompt) + (length.get("max_new_tokens") or TOKENS))


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_without_a_length_it_has_transformers_default(pair) -> None:
    target, medium = pair("llama")
    options = {"max_new_tokens": None}
    assert ours(target, medium, PROMPTS[3], **options).shape[1] == len(PROMPTS[3]) + 20


def test_stop_strings_end_it_where_transformers_would_inside_a_round_too(pair, letters) -> None:
    target, medium = pair("llama")
    text = letters.decode(answer(theirs(target, PROMPTS[3]), PROMPTS[3]))
    lengths = set()
    for start in range(0, len(text) - 3, 3):
        stop = [text[start : start + 3], "zzz"]
        reference = theirs(target, PROMPTS[3], stop_strings=stop, tokenizer=letters)
        lengths.add(reference.shape[1])
        output = ours(target, medium, PROMPTS[3], stop_strings=stop, tokenizer=letters)
        assert torch.equal(output, reference), stop
    assert len(lengths) > 5


class Stop(StoppingCriteria):
    """Stops where the text has `length` tokens, and remembers the lengths of all texts and scores that it saw."""

    def __init__(self, length: int):
        self.length = length
        self.seen: list[tuple[int, int | None]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append((input_ids.shape[1], scores and len(scores)))
        return torch.tensor([input_ids.shape[1] >= self.length])


@pytest.mark.parametrize("rows", [{}, {"return_dict_in_generate": True, "output_scores": True}], ids=["ids", "scores"])
def test_a_stopping_criterion_is_asked_after_every_token_as_in_transformers(pair, rows: dict[str, Any]) -> None:
    target, medium = pair("llama")
    for count in range(2, 8):
        expected, stop = Stop(len(PROMPTS[3]) + count), Stop(len(PROMPTS[3]) + count)
        theirs(target, PROMPTS[3], stopping_criteria=StoppingCriteriaList([expected]), **rows)
        output = ours(target, medium, PROMPTS[3], stopping_criteria=StoppingCriteriaList([stop]), **rows)
        assert (output.sequences if rows else output).shape[1] == stop.length
        assert stop.seen == expected.seen and len(stop.seen) == count


def test_no_time_leaves_one_token(pair) -> None:
    target, medium = pair("llama")
    assert ours(target, medium, PROMPTS[3], max_time=0.0).shape[1] == len(PROMPTS[3]) + 1


def test_a_log_values_the_round_that_a_stop_string_ends_as_it_was_live(pair, letters) -> None:
    target, medium = pair("llama")
    drafting = Drafting(depth=3, width=3, children=3, budget=16)
    plan = Plan("medium", Mask(0b111), drafting, Cut("none"))
    text = letters.decode(answer(theirs(target, PROMPTS[3]), PROMPTS[3]))
    inside = 0
    for start in range(0, len(text) - 3, 3):
        criteria = StoppingCriteriaList([StopStringCriteria(letters, [text[start : start + 3]])])
        trees: list[Any] = []
        *_, decoded = decode_rounds(
            target, medium, PROMPTS[3], plan, TOKENS, on_tree=lambda tree, *_: trees.append(tree),  # noqa: B023
            ends=lambda ids: bool(criteria(torch.tensor([ids]), None)),  # noqa: B023
        )  # fmt: skip
        for tree, done in zip(trees, decoded.rounds, strict=True):
            facts = leaf_facts(tree, tuple(done.tokens), decoded.tokens[done.position + 1 :], drafting.budget)
            assert len(facts["accepted"]) == done.accepted
        # A round that ends on an accepted node has no bonus token.
        emitted = 1 + sum(done.accepted + 1 for done in decoded.rounds)
        assert emitted - len(decoded.tokens) in (0, 1)
        inside += emitted > len(decoded.tokens)
    assert inside > 1


# What is refused


REFUSED: list[tuple[str, Callable[[Model, Model], dict[str, Any]]]] = [
    ("num_beams", lambda target, medium: {"num_beams": 2}),
    ("num_return_sequences", lambda target, medium: {"num_return_sequences": 2, "do_sample": True}),
    ("penalty_alpha", lambda target, medium: {"penalty_alpha": 0.6, "top_k": 4}),
    ("prompt_lookup_num_tokens", lambda target, medium: {"prompt_lookup_num_tokens": 3}),
    ("assistant_model", lambda target, medium: {"assistant_model": medium.lm}),
    ("dola_layers", lambda target, medium: {"dola_layers": "low"}),
    ("output_attentions", lambda target, medium: {"output_attentions": True}),
    ("output_hidden_states", lambda target, medium: {"output_hidden_states": True}),
    ("use_cache=False", lambda target, medium: {"use_cache": False}),
    ("cache_implementation", lambda target, medium: {"cache_implementation": "static"}),
    ("a cache of one's own", lambda target, medium: {"cache": DynamicCache()}),
    ("synced_gpus", lambda target, medium: {"synced_gpus": True}),
    ("padding", lambda target, medium: {"attention_mask": torch.tensor([[0] + [1] * (len(PROMPTS[3]) - 1)])}),
    ("position_ids", lambda target, medium: {"position_ids": torch.arange(len(PROMPTS[3]))[None] + 1}),
    ("inputs_embeds", lambda target, medium: {"inputs_embeds": torch.ones(1, len(PROMPTS[3]), 64)}),
    (
        "more than one prompt",
        lambda target, medium: dict.fromkeys(("input_ids", "attention_mask"), torch.ones(2, 3, dtype=torch.long)),
    ),
    ("tokenizer", lambda target, medium: {"stop_strings": ["a"]}),
    ("load_model", lambda target, medium: {"medium": medium.name}),
    ("calls a medium drafter", lambda target, medium: {"medium": None}),
    ("'sometimes'", lambda target, medium: {"schedule": "sometimes"}),
    ("exceed the context", lambda target, medium: {"max_new_tokens": 600}),
]


@pytest.mark.parametrize("name, options", REFUSED, ids=[name for name, _ in REFUSED])
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_honoured_is_refused_by_name(pair, name: str, options: Any) -> None:
    target, medium = pair("llama")
    asked = {"medium": medium, "schedule": "medium", "custom_generate": treegraft.generate, **options(target, medium)}
    with pytest.raises(ValueError, match=name):
        target.lm.generate(**{**ask(PROMPTS[3]), **asked})


def test_a_drafter_of_a_vocabulary_of_quite_another_size_is_refused(pair, tmp_path) -> None:
    target, _ = pair("llama")
    for size in (90, 410):
        other = load_model(str(save_lm(tmp_path / str(size), config("llama", size=size, layers=1), 0)))
        with pytest.raises(ValueError, match=f"embeds 200 tokens and drafter .* {size}"):
            ours(target, other, PROMPTS[3])


def test_an_artifacts_file_is_followed_only_with_the_models_it_was_learned_with(pair, tmp_path) -> None:
    target, medium = pair("llama")
    models = {"target": target.fingerprint, "medium": medium.fingerprint}
    path = tmp_path / "scheduler.json"
    for of, sound in ((models, True), (models | {"medium": "0" * 16}, False)):
        path.write_text(replace(artifacts.make(Mask(0b011)), models=of).to_json())
        if sound:
            mine, reference = (
                answer(ids, PROMPTS[3]) for ids in (ours(target, medium, PROMPTS[3], path), theirs(target, PROMPTS[3]))
            )
            assert same_text(target, PROMPTS[3], mine, reference)
        else:
            with pytest.raises(ValueError, match="another medium than"):
                ours(target, medium, PROMPTS[3], path)
