"""What is wrong with a model is said, with its name, before any text is decoded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VOCABULARY, config, greedy, save_lm, tokenizer
from transformers import AutoConfig

import treegraft
from treegraft.runtime import models
from treegraft.runtime.decode import AUTOREGRESSIVE, ContextError, Plan, decode
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.models import ModelError, check_pair, load_model, native_dtype
from treegraft.runtime.scheduler import Mask
from treegraft.runtime.size import Cut

SMALL, MEDIUM = (Plan(bin(m), Mask(m), Drafting(depth=3, width=2, children=2), Cut("none")) for m in (0b000, 0b111))


def save_config(folder: Path, kind: str, **settings) -> str:  # type: ignore[no-untyped-def]
    AutoConfig.for_model(kind, **settings).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def test_a_missing_model_is_named() -> None:
    with pytest.raises(ModelError, match=r"model '/no/such/folder': neither a local folder .* 'default'"):
        load_model("/no/such/folder")


def test_a_missing_gguf_file_is_named() -> None:
    with pytest.raises(ModelError, match=r"model '/no/such/model\.gguf': no such file"):
        load_model("/no/such/model.gguf")


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_model(str(tmp_path))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = save_lm(tmp_path / "model", config("llama"), seed=0)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=f"model '{folder}': cannot be loaded"):
        load_model(str(folder))
    weights.write_bytes(b"")
    with pytest.raises(ModelError, match=f"model '{folder}': cannot be loaded"):
        load_model(str(folder))
    weights.unlink()
    with pytest.raises(ModelError, match=f"model '{folder}': cannot be loaded"):
        load_model(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=f"model '{folder}'"):
        load_model(str(folder))


def test_a_damaged_gguf_file_is_named_and_leaves_nothing_in_the_cache(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("TREEGRAFT_CACHE", str(tmp_path / "cache"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF nothing")
    with pytest.raises(ModelError, match=r"broken\.gguf': cannot be read as GGUF"):
        load_model(str(broken))
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_an_encoder_decoder_is_refused_with_the_reason(tmp_path: Path, kind: str) -> None:
    name = save_config(tmp_path, kind, vocab_size=VOCABULARY, d_model=32)
    with pytest.raises(ModelError, match=rf"'{name}' \({kind}\) is an encoder-decoder"):
        load_model(name)


def test_models_of_one_vocabulary_make_a_pair(pair) -> None:  # type: ignore[no-untyped-def]
    check_pair(*pair("llama"))
    check_pair(pair("llama")[0], pair("qwen3")[1])


def test_models_of_different_vocabularies_are_told_where_they_differ(pair, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    target, _ = pair("llama")
    swapped = load_model(str(save_lm(tmp_path / "swapped", config("llama"), seed=0, swap=(3, 7))))
    with pytest.raises(ModelError, match=r"2 tokens differ.*'t3' \(3 / 7\), 't7' \(7 / 3\)") as caught:
        check_pair(target, swapped)
    assert target.name in str(caught.value) and swapped.name in str(caught.value)
    smaller = load_model(str(save_lm(tmp_path / "smaller", config("llama", size=190), seed=0)))
    with pytest.raises(ModelError, match=r"10 tokens differ.*'t190' \(190 / None\), 't191' \(191 / None\)"):
        check_pair(target, smaller)


def test_the_context_is_the_models(pair) -> None:  # type: ignore[no-untyped-def]
    assert pair("llama")[0].context == 512


@pytest.mark.parametrize(
    ("kind", "settings", "context"),
    [
        ("mistral", {"sliding_window": 40}, 40),
        ("mistral", {"sliding_window": 4096}, 512),
        ("mistral", {"sliding_window": None}, 512),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}, 40),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 40}, 512),
    ],
    ids=str,
)
def test_a_sliding_window_limits_the_context(tmp_path: Path, kind: str, settings: dict[str, int], context: int) -> None:
    model = load_model(str(save_lm(tmp_path, config(kind, **settings), seed=0)))
    assert model.context == context
    if context == 40:  # up to there the text is the one that the model itself generates
        prompt = list(range(20))
        ids = torch.tensor([prompt])
        reference = model.lm.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=17)
        assert decode(model, None, prompt, SMALL, 17).tokens == reference[0, 20:].tolist()
        with pytest.raises(ContextError, match=r"20 prompt tokens \+ 18 new \+ 3 drafted = 41 exceed .* 40 tokens"):
            decode(model, None, prompt, SMALL, 18)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "dynamic", "factor": 4.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_a_stretched_position_encoding_reaches_as_far_as_it_was_stretched(tmp_path: Path, rope: dict[str, Any]) -> None:
    settings = config("llama", max_position_embeddings=64, rope_parameters={"rope_theta": 10000.0, **rope})
    folder = str(save_lm(tmp_path / "target", settings, seed=0))
    model, drafter = load_model(folder), load_model(folder)
    assert model.context == 256
    for length in (20, 100):  # the answer crosses 64 tokens, the prompt does
        prompt = [token * 7 % VOCABULARY for token in range(length)]
        reference = greedy(load_model(folder), prompt, 80)
        for plan in (SMALL, MEDIUM):
            assert decode(model, drafter, prompt, plan, 80).tokens == reference
    with pytest.raises(ContextError, match="256 tokens"):
        decode(model, None, [1] * 250, SMALL, 80)


def test_a_prompt_beyond_the_context_is_refused(pair) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair("llama")
    with pytest.raises(ContextError, match=r"513 prompt tokens \+ 1 new .* exceed the context of .*512 tokens"):
        decode(target, None, [1] * 513, AUTOREGRESSIVE, 1)
    assert len(decode(target, None, [1] * 508, AUTOREGRESSIVE, 4).tokens) == 4
    with pytest.raises(ContextError, match="shorten the prompt or lower --max-new-tokens"):
        decode(target, medium, [1] * 507, SMALL, 4)


def test_a_prompt_beyond_the_drafters_context_is_refused(pair, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    target, _ = pair("llama")
    short = load_model(str(save_lm(tmp_path, config("llama", max_position_embeddings=64), seed=0)))
    with pytest.raises(ContextError, match=str(tmp_path)):
        decode(target, short, [1] * 60, SMALL, 4)


def test_an_empty_prompt_is_refused(pair) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ContextError, match="the prompt is empty"):
        decode(pair("llama")[0], None, [], AUTOREGRESSIVE, 4)


def test_a_fingerprint_follows_the_weights(pair, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair("llama")
    assert load_model(target.name).fingerprint == target.fingerprint != medium.fingerprint
    assert load_model(target.name, dtype="bfloat16").fingerprint == target.fingerprint


@pytest.mark.parametrize(
    ("supported", "fast", "native"), [(True, True, "bfloat16"), (True, False, "float32"), (False, True, "float32")]
)
def test_the_native_precision_is_what_the_processor_multiplies(monkeypatch, supported, fast, native) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: fast)
    monkeypatch.setattr(models.platform, "machine", lambda: "x86_64")
    assert native_dtype("cpu") == native
    assert native_dtype("meta") == "float32"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_by_default_a_model_is_loaded_in_the_native_precision(monkeypatch, pair, dtype: str) -> None:  # type: ignore[no-untyped-def]
    names = [model.name for model in pair("llama")]
    monkeypatch.setattr(models, "native_dtype", lambda device: dtype)
    assert load_model(names[0]).lm.dtype == getattr(torch, dtype)
    target, medium = treegraft.Decoder(*names)._loaded()
    assert medium is not None and target.lm.dtype == medium.lm.dtype == getattr(torch, dtype)
    assert load_model(names[0], dtype="float16").lm.dtype == torch.float16


def test_the_default_target_is_converted_once_and_then_read_from_the_cache() -> None:
    folder = Path(load_model("default").lm.name_or_path)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= before.keys()
    model = load_model("default")
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert model.lm.dtype == torch.float32 and model.context > 1000
    prompt = model.tokenizer("The capital of France is")["input_ids"]
    answer = decode(model, None, prompt, SMALL, 4)
    assert "Paris" in model.tokenizer.decode(answer.tokens)


def test_a_reduced_drafter_is_no_target(pair, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = save_lm(tmp_path, config("llama", layers=1), 0)
    (folder / "draft_vocabulary.json").write_text("[1, 2, 3]")
    with pytest.raises(ModelError, match="cannot be a target"):
        check_pair(load_model(str(folder)), pair("llama")[1])


def test_a_model_that_lacks_weights_or_has_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    folder = save_lm(tmp_path / "target", config("llama", layers=1), 0)
    with pytest.raises(ModelError, match="int3"):
        load_model(str(folder), dtype="int3")
    more = config("llama", layers=2)
    more.save_pretrained(folder)
    with pytest.raises(ModelError, match="lack"):
        load_model(str(folder))
