"""`Decoder`: load once, serve many requests."""

import copy
import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import VOCABULARY, config, greedy, make_pair, prompts, save_lm
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import torch
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


@pytest.mark.parametrize(
    "options", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"temperature": 1.0, "top_p": 1.5}], ids=str
)
def test_an_option_out_of_range_is_refused_by_name(decoder, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=list(options)[-1]):
        decoder.generate(PROMPTS[2], **options)


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
