"""`Decoder`: load once, serve many requests."""

import copy
import gc
import math
import sys
import weakref
from collections import UserList, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from tiny import VOCABULARY, config, greedy, make_pair, prompts, save_lm
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import BatchEncoding, PreTrainedTokenizerFast

import treegraft
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.models import Model
from treegraft.runtime.plan import check_models, plan_from_artifact
from treegraft.runtime.scheduler import Artifact, Mask, Rule, Rules

TOKENS = 20
PROMPTS = prompts(4, seed=4)


@pytest.fixture(scope="module")
def decoder(pair) -> treegraft.Decoder:
    return treegraft.Decoder(*pair("llama"), schedule="0b00011")


def test_threads_may_share_a_model_with_each_other_and_with_its_own_generate(pair) -> None:
    target, medium = pair("mistral")
    decoders = [treegraft.Decoder(target, medium, schedule="0b00011") for _ in range(2)]
    ways = [*(lambda prompt, one=one: one.generate(prompt, TOKENS).tokens for one in decoders),
            lambda prompt: greedy(target, prompt, TOKENS)]  # fmt: skip
    alone = {i: greedy(target, prompt, TOKENS) for i, prompt in enumerate(PROMPTS)}
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as pool:
            runs = [(i, pool.submit(way, prompt)) for i, prompt in enumerate(PROMPTS) for way in ways * 3]
            found = [(i, run.result()) for i, run in runs]
    finally:
        sys.setswitchinterval(usual)
    assert all(tokens == alone[i] for i, tokens in found)
    assert target.lm.config._attn_implementation == "sdpa"


def words(tokens: list[int]) -> str:
    return " ".join(f"t{token}" for token in tokens)


def test_ids_and_text_give_the_targets_answer_with_what_the_rounds_did(pair, decoder) -> None:
    target, _ = pair("llama")
    for prompt in PROMPTS[2:4]:
        reference = greedy(target, prompt, TOKENS)
        for asked in (prompt, words(prompt)):
            answer = decoder.generate(asked, max_new_tokens=TOKENS)
            assert answer.tokens == reference and answer.text == words(reference)
            assert sum(done.accepted + 1 for done in answer.rounds) + 1 >= TOKENS
            assert answer.rounds[0].mask == 0b11


def test_messages_go_through_the_chat_template(pair) -> None:
    target, _ = pair("llama")
    messages = [{"role": "user", "content": "t5 t6"}]
    with pytest.raises(ValueError, match=r"no chat template.*--raw"):
        treegraft.Decoder(target).generate(messages)
    tokenizer = target.tokenizer.__class__(tokenizer_object=target.tokenizer.backend_tokenizer, unk_token="t0")
    tokenizer.chat_template = "t1 {{ messages[0]['content'] }} t2"
    answer = treegraft.Decoder(replace(target, tokenizer=tokenizer)).generate(messages, max_new_tokens=4)
    assert answer.tokens == greedy(target, [1, 5, 6, 2], 4)


def test_a_stream_gives_a_piece_a_round_and_how_far_the_answer_has_come(decoder) -> None:
    whole = decoder.generate(PROMPTS[3], TOKENS)
    stream = decoder.stream(PROMPTS[3], TOKENS)
    pieces = [next(stream)]
    assert stream.answer.text == pieces[0] == words(whole.tokens[:1]) and stream.answer.rounds == []
    pieces += stream
    assert "".join(pieces) == whole.text == stream.answer.text
    assert stream.answer.tokens == whole.tokens and len(stream.answer.rounds) == len(whole.rounds)


def test_a_stream_never_shows_half_a_character(pair) -> None:
    target, _ = pair("llama")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[-VOCABULARY:]
    inner = Tokenizer(WordLevel({letter: token for token, letter in enumerate(alphabet)}, unk_token=alphabet[0]))
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    decoder = treegraft.Decoder(replace(target, tokenizer=tokenizer), schedule="small")
    held = 0
    for seed in range(3):
        pieces = list(decoder.stream(PROMPTS[3], 30, temperature=1.0, seed=seed))
        assert "".join(pieces) == decoder.generate(PROMPTS[3], 30, temperature=1.0, seed=seed).text
        assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])
        held += pieces.count("")
    assert held > 3


def test_one_seed_gives_one_text_and_another_seed_another(decoder) -> None:
    first, same, other = (decoder.generate(PROMPTS[2], TOKENS, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert first.tokens == same.tokens != other.tokens


def test_no_seed_is_a_fresh_one_and_the_answer_says_which(decoder) -> None:
    answers = [decoder.generate(PROMPTS[2], TOKENS, temperature=5.0, seed=None) for _ in range(3)]
    assert len({answer.seed for answer in answers}) == len({tuple(answer.tokens) for answer in answers}) == 3
    for answer in answers:
        assert decoder.generate(PROMPTS[2], TOKENS, temperature=5.0, seed=answer.seed).tokens == answer.tokens
    assert decoder.generate(PROMPTS[2], TOKENS, temperature=5.0, seed=3).seed == 3
    assert decoder.generate(PROMPTS[2], TOKENS, seed=3).seed is None  # greedy
    stream = decoder.stream(PROMPTS[2], TOKENS, temperature=5.0, seed=None)
    assert next(stream) and stream.answer.seed is not None


def test_threads_and_interleaved_streams_get_the_answers_they_would_get_alone(decoder) -> None:
    alone = [decoder.generate(prompt, TOKENS).text for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(lambda prompt: decoder.generate(prompt, TOKENS).text, PROMPTS)) == alone
    streams = [decoder.stream(prompt, TOKENS) for prompt in PROMPTS]
    next(streams[0])  # a stream that waits keeps nobody else waiting
    for stream in reversed(streams):
        for _ in stream:
            pass
    assert [stream.answer.text for stream in streams] == alone


def test_closing_frees_the_models_and_ends_all_service(tmp_path: Path) -> None:
    make_pair(tmp_path, "llama")
    with treegraft.Decoder(str(tmp_path / "llama-target"), str(tmp_path / "llama-medium"), "medium") as decoder:
        decoder.generate([1, 2, 3], 4)
        held = [weakref.ref(model.lm) for model in decoder._loaded()]
        assert all(lm() is not None for lm in held)
    gc.collect()
    assert all(lm() is None for lm in held)
    with pytest.raises(ValueError, match="closed"):
        decoder.generate([1, 2, 3], 4)


def test_what_cannot_be_served_is_refused_when_the_decoder_is_made(pair, tmp_path: Path) -> None:
    target, medium = pair("llama")
    with pytest.raises(ValueError, match="'medium' calls a medium drafter"):
        treegraft.Decoder(target, schedule="medium")
    with pytest.raises(ValueError, match="'sometimes'"):
        treegraft.Decoder(target, medium, schedule="sometimes")
    other = str(save_lm(tmp_path, config("llama", layers=1), 0, swap=(3, 4)))
    with pytest.raises(ValueError, match="do not share a vocabulary"):
        treegraft.Decoder(target, other, schedule="medium")


def test_an_artifact_of_other_models_is_refused_unless_it_comes_as_a_plan(pair, tmp_path: Path) -> None:
    target, medium = pair("llama")
    drafting = Drafting(depth=2)
    for role, model in (("target", target), ("medium", medium)):
        models = {"target": target.fingerprint, "medium": medium.fingerprint}
        artifacts = [Artifact(Mask(0b11), drafting.as_dict(), {"kind": "none"}, 0, models | {role: "0" * 16})]
        artifacts.append(Artifact(Mask(0b11), drafting.as_dict(), {"kind": "none"}, 0, models))
        foreign, own = (plan_from_artifact(artifact, "learned") for artifact in artifacts)
        check_models(own, target, medium)
        with pytest.raises(ValueError, match=f"another {role} than {model.name}"):
            check_models(foreign, target, medium)
        assert len(treegraft.Decoder(target, medium, foreign).generate([1, 2], 4).tokens) == 4


def test_decisions_by_the_fallback_schedule_are_counted_in_the_answer(pair) -> None:
    target, medium = pair("llama")
    unknown = Rules((Rule(1, (("target_margin", ">", 0.0),)),), ("target_margin",))
    artifact = Artifact(unknown, Drafting(depth=2).as_dict(), {"kind": "none"}, 0b10, {})
    plan = plan_from_artifact(artifact, "learned")
    sound = treegraft.Decoder(target, medium, plan).generate([1, 2], 8)
    assert sound.fallbacks == 0
    broken_target = replace(target, lm=copy.deepcopy(target.lm))
    head = broken_target.lm.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, logits: logits.index_fill(-1, torch.tensor([3]), torch.inf))
    with pytest.warns(UserWarning, match="'target_margin'"):
        broken = treegraft.Decoder(broken_target, medium, plan, monitor=False).generate([1, 2], 8)
    assert broken.fallbacks == 2 * len(broken.rounds) and all(done.mask == 0b10 for done in broken.rounds)


def test_a_prompt_that_does_not_fit_is_refused(decoder) -> None:
    with pytest.raises(ValueError, match="empty"):
        decoder.generate([])
    with pytest.raises(ValueError, match="exceed the context"):
        decoder.generate([1] * 500, max_new_tokens=20)


WRONG = {
    "max_new_tokens": (0, -1, 2.0, True, "4", None, math.inf),
    "temperature": (-1.0, -1, math.nan, math.inf, 10**400, True, "1", None),
    "top_k": (-1, 2.0, True, "4", None),
    "top_p": (-0.1, 1.5, math.nan, True, "1", None),
    "repetition_penalty": (0, 0.0, -1.0, math.nan, math.inf, True, "1", None),
    "seed": (-1, 2**63, 1.0, True, "1", math.nan),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_option_out_of_range_or_of_another_kind_is_refused_by_name(decoder, name: str) -> None:
    for value in WRONG[name]:
        for others in ({}, {"temperature": 1.0}):
            with pytest.raises(ValueError, match=rf"^{name} is {value!r}; it must be "):
                decoder.stream(PROMPTS[2], **{**others, name: value})


def test_an_option_may_be_a_number_of_any_make(decoder) -> None:
    usual = decoder.generate(PROMPTS[2], 6, temperature=2.0, top_k=9, top_p=1.0, repetition_penalty=2.0, seed=4)
    for whole, real in ((int, int), (np.int64, np.float32), (np.int32, np.float64)):
        options = {"temperature": real(2), "top_k": whole(9), "top_p": real(1), "repetition_penalty": real(2)}
        assert decoder.generate(PROMPTS[2], whole(6), **options, seed=whole(4)).tokens == usual.tokens


ROWS = [
    list, tuple, np.array, torch.tensor, deque, UserList,
    lambda ids: [ids], lambda ids: (tuple(ids),), lambda ids: torch.tensor([ids]), lambda ids: np.array([ids]),
    lambda ids: [torch.tensor(ids)], lambda ids: list(torch.tensor(ids)), lambda ids: list(np.array(ids)),
    lambda ids: np.array(ids, dtype=np.uint8), lambda ids: torch.tensor(ids, dtype=torch.int32),
    lambda ids: {"input_ids": ids}, lambda ids: {"input_ids": [ids], "attention_mask": [[1] * len(ids)]},
    lambda ids: BatchEncoding({"input_ids": ids, "attention_mask": [1] * len(ids)}),
    lambda ids: BatchEncoding({"input_ids": [ids], "attention_mask": [[1] * len(ids)]}, tensor_type="pt"),
    lambda ids: BatchEncoding({"input_ids": [ids]}, tensor_type="np"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("ids", [[5, 6, 7], [5]], ids=str)
def test_one_row_of_ids_is_a_prompt_in_any_container(decoder, row: Callable[[list[int]], Any], ids: list[int]) -> None:
    assert decoder.generate(row(ids), 4).tokens == decoder.generate(ids, 4).tokens


def test_a_range_and_a_tokenizers_output_are_prompts(pair, decoder) -> None:
    target, _ = pair("llama")
    assert decoder.generate(range(3, 7), 4).tokens == decoder.generate([3, 4, 5, 6], 4).tokens
    for tensors in (None, "pt", "np"):
        made = target.tokenizer("t5 t6", return_tensors=tensors)
        assert decoder.generate(made, 4).tokens == decoder.generate([5, 6], 4).tokens


USER = {"role": "user", "content": "t5"}
NO_PROMPTS: list[tuple[Any, str]] = [
    (["a b", "c"], "item 0 is 'a b', a str"), (["a b"], "item 0 is 'a b', a str"), ([1, "2"], "item 1 is '2', a str"),
    ([1.0, 2.0], "item 0 is 1.0, a float"), ([True, False], "item 0 is True, a bool"),
    ([1, None], "item 1 is None, a NoneType"), (np.array([1.0]), "a float"), (torch.tensor([1.0, 2.0]), "a float"),
    (torch.tensor([True]), "a bool"), ([np.True_], "a bool"), ([torch.tensor(1.5)], "a float"),
    ([[1, 2], [3]], "2 rows"), (torch.ones(2, 3, dtype=torch.long), "2 rows"), ([USER["role"], USER], "'user', a str"),
    ([[[1, 2]]], "a row that holds another"), ([1, [2]], "a row that holds"), (np.ones((1, 1, 3)), "a row that"),
    (b"ab", "a bytes"), (bytearray(b"ab"), "a bytearray"), (memoryview(b"ab"), "a memoryview"), ({1, 2}, "a set"),
    (frozenset([1]), "a frozenset"), (5, "5, a int"), (1.5, "a float"), (None, "None, a NoneType"), (True, "a bool"),
    (iter([1, 2]), "iterator"), (torch.tensor(5), "a Tensor"), (object(), "a object"),
    ({}, "without input_ids"), (USER, "without input_ids"), ({"input_ids": "t5"}, "'t5', a str"),
    ({"input_ids": [[1, 2], [3, 4]]}, "2 rows"), ({"input_ids": [0, 5], "attention_mask": [0, 1]}, "padded"),
    ({"input_ids": torch.tensor([[0, 5]]), "attention_mask": torch.tensor([[0, 1]])}, "padded"),
    ([USER, "t5"], "message 1 is 't5'"), ([{}], "message 0 is {}"), ([USER, {"content": "t5"}], "message 1 is"),
    ([{"role": "user"}], "needs `role` and `content` strings"), ([{"role": 1, "content": "t5"}], "message 0 is"),
    ([{"role": "user", "content": b"t5"}], "message 0 is"), ([{"role": "user", "content": None}], "message 0 is"),
]  # fmt: skip


@pytest.mark.parametrize("prompt, named", NO_PROMPTS, ids=[repr(prompt)[:40] for prompt, _ in NO_PROMPTS])
def test_what_is_no_prompt_is_refused_by_name(decoder, prompt: Any, named: str) -> None:
    with pytest.raises(ValueError, match=r"^(the prompt|message \d) is ") as caught:
        decoder.stream(prompt, 4)
    assert named in str(caught.value)


def test_messages_that_the_chat_template_refuses_are_refused_by_name(pair) -> None:
    target, _ = pair("llama")
    tokenizer = copy.deepcopy(target.tokenizer)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match=r"template of .*-target' refuses these messages: roles must alternate"):
        treegraft.Decoder(replace(target, tokenizer=tokenizer)).stream([USER])


def test_text_that_is_not_unicode_is_refused_in_words(pair, decoder) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    chats = treegraft.Decoder(replace(pair("llama")[0], tokenizer=tokenizer))
    for serves, prompt in ((decoder, "caf\udce9"), (chats, [{"role": "user", "content": "caf\udce9"}])):
        with pytest.raises(ValueError, match=r"^the prompt holds '\\udce9', which is no character"):
            serves.generate(prompt)


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_a_token_id_that_the_model_does_not_embed_is_refused_by_name(decoder, token: int) -> None:
    with pytest.raises(ValueError, match=f"token id {token} .* embeds {VOCABULARY}"):
        decoder.generate([1, token, 2])


def test_a_stream_that_has_begun_outlives_its_decoder(pair) -> None:
    decoder = treegraft.Decoder(*pair("llama"), schedule="medium")
    alone = decoder.generate(PROMPTS[3], TOKENS).text
    stream = decoder.stream(PROMPTS[3], TOKENS)
    first = next(stream)
    decoder.close()
    assert first + "".join(stream) == alone


def test_the_package_names_what_it_offers() -> None:
    assert all(hasattr(treegraft, name) for name in treegraft.__all__)
    assert treegraft.Model is Model
    with pytest.raises(AttributeError, match="Decodr"):
        treegraft.Decodr  # noqa: B018
