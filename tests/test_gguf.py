"""A GGUF file is loaded whole, with all that it says, or refused in words."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_file import END, MESSAGE, TURN, tiny_llama, write_gguf
from transformers import PreTrainedModel

from treegraft.runtime.converted import FORMAT
from treegraft.runtime.decode import AUTOREGRESSIVE, decode, end_tokens
from treegraft.runtime.gguf import LLAMA3
from treegraft.runtime.models import ModelError, load_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch) -> Path:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("TREEGRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def assert_holds(loaded: PreTrainedModel, lm: PreTrainedModel) -> None:
    ids = torch.arange(20)[None]
    torch.testing.assert_close(loaded(ids).logits, lm(ids).logits)
    assert loaded.state_dict().keys() >= lm.state_dict().keys() - {"lm_head.weight"}


@pytest.mark.parametrize("tied", [False, True], ids=["a head of its own", "a tied head"])
def test_every_weight_is_the_files(tmp_path: Path, tied: bool) -> None:
    lm = tiny_llama(tie_word_embeddings=tied)
    assert_holds(load_model(str(write_gguf(tmp_path / "tiny.gguf", lm))).lm, lm)


def test_the_extension_may_be_in_capitals(tmp_path: Path) -> None:
    lm = tiny_llama()
    path = write_gguf(tmp_path / "tiny.gguf", lm).rename(tmp_path / "TINY.GGUF")
    assert_holds(load_model(str(path)).lm, lm)


@pytest.mark.parametrize("named", [1, 2, 5])
def test_a_split_file_loads_whole_by_any_of_its_shards(tmp_path: Path, named: int) -> None:
    lm = tiny_llama()
    first = write_gguf(tmp_path / "tiny.gguf", lm, split=5, eos_token_id=END, eot_token_id=TURN)
    assert first.name == "tiny-00001-of-00005.gguf"
    loaded = load_model(str(first.with_name(f"tiny-0000{named}-of-00005.gguf")))
    assert_holds(loaded.lm, lm)
    assert end_tokens(loaded) == {END, TURN}
    kept = {path.name for path in Path(loaded.lm.name_or_path).iterdir()}
    assert not any("gguf" in name for name in kept)


def test_all_shards_name_one_folder_in_the_cache(tmp_path: Path, cache: Path) -> None:
    first = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), split=12)
    for path in sorted(tmp_path.glob("*.gguf")):
        load_model(str(path))
    assert first.name == "tiny-00001-of-00002.gguf" and len(list(cache.iterdir())) == 1


def test_a_missing_shard_is_refused_by_its_name(tmp_path: Path, cache: Path) -> None:
    first = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), split=5)
    (tmp_path / "tiny-00003-of-00005.gguf").unlink()
    with pytest.raises(ModelError, match=r"no such file as .*tiny-00003-of-00005\.gguf; put all 5 shards"):
        load_model(str(first))
    assert not cache.exists()


@pytest.mark.parametrize("name", ["other.gguf", "tiny-00002-of-00005.gguf", "tiny-00001-of-00001.gguf"])
def test_a_shard_under_a_wrong_name_is_refused(tmp_path: Path, cache: Path, name: str) -> None:
    first = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), split=5)
    shutil.copy(first, tmp_path / name)
    with pytest.raises(ModelError, match=rf"{name}'.*it says that it is shard 1 of 5.*-00001-of-00005\.gguf"):
        load_model(str(tmp_path / name))
    assert not list(cache.iterdir())


def test_shards_that_do_not_belong_together_are_refused(tmp_path: Path, cache: Path) -> None:
    first = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), split=7)
    without = write_gguf(tmp_path / "less.gguf", tiny_llama(), ("blk.0.attn_q.weight",), split=7)
    last = tmp_path / "tiny-00003-of-00003.gguf"
    shutil.copy(without.with_name("less-00003-of-00003.gguf"), last)
    with pytest.raises(ModelError, match=r"tiny-00001-of-00003\.gguf': its shards hold 20 tensors, not the 21"):
        load_model(str(first))
    shutil.copy(tmp_path / "tiny-00002-of-00003.gguf", last)
    with pytest.raises(ModelError, match="it says that it is shard 2 of 3"):
        load_model(str(first))
    assert not list(cache.iterdir())


@pytest.mark.parametrize(
    ("absent", "named"),
    [
        ("blk.1.ffn_down.weight", r"model\.layers\.1\.mlp\.down_proj\.weight, .*1 such"),
        ("token_embd.weight", r"model\.embed_tokens\.weight, .*1 such"),
        ("output_norm.weight", r"model\.norm\.weight, .*1 such"),
    ],
)
def test_a_file_without_a_tensor_is_refused_by_the_tensors_name(
    tmp_path: Path, cache: Path, absent: str, named: str
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), (absent,))
    with pytest.raises(ModelError, match=rf"tiny\.gguf': it lacks the weights {named}"):
        load_model(str(path))
    assert not list(cache.iterdir())


def test_a_file_without_any_embeddings_is_refused(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), ("token_embd.weight", "output.weight"))
    with pytest.raises(ModelError, match="it lacks the weights"):
        load_model(str(path))
    assert not list(cache.iterdir())


def test_a_file_with_weights_that_the_architecture_has_no_place_for_is_refused(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(attention_bias=True))
    with pytest.raises(ModelError, match=r"it holds \d+ weights, but .* LlamaForCausalLM of \d+"):
        load_model(str(path))
    assert not list(cache.iterdir())


def test_a_file_with_weights_of_another_shape_is_refused_by_their_name(tmp_path: Path, cache: Path) -> None:
    lm = tiny_llama()
    lm.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(torch.ones(64, 80))
    with pytest.raises(ModelError, match=r"it lacks the weights model\.layers\.1\.mlp\.down_proj\.weight, or has them"):
        load_model(str(write_gguf(tmp_path / "tiny.gguf", lm)))
    assert not list(cache.iterdir())


@pytest.mark.parametrize("left", [0.02, 0.3, 0.99])
def test_a_file_that_was_cut_short_is_refused(tmp_path: Path, cache: Path, left: float) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    whole = path.read_bytes()
    path.write_bytes(whole[: int(left * len(whole))])
    with pytest.raises(ModelError, match=r"tiny\.gguf': cannot be read as GGUF, it is cut short or damaged"):
        load_model(str(path))
    assert not list(cache.iterdir())


def test_a_shard_that_was_cut_short_is_refused_by_its_name(tmp_path: Path, cache: Path) -> None:
    first = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), split=5)
    cut = tmp_path / "tiny-00004-of-00005.gguf"
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"tiny-00004-of-00005\.gguf': cannot be read as GGUF, it is cut short"):
        load_model(str(first))
    assert not list(cache.iterdir())


def test_what_an_older_version_left_in_the_cache_is_not_read(tmp_path: Path, cache: Path) -> None:
    lm = tiny_llama()
    path = write_gguf(tmp_path / "tiny.gguf", lm)
    made = Path(load_model(str(path)).lm.name_or_path)
    older = made.rename(cache / made.name.removesuffix(f"-{FORMAT}"))
    assert older != made
    (older / "model.safetensors").write_bytes(b"random")
    assert_holds(load_model(str(path)).lm, lm)


@pytest.mark.parametrize(
    ("said", "ends"),
    [
        ({"eos_token_id": END}, {END}),
        ({"eos_token_id": END, "eot_token_id": TURN}, {END, TURN}),
        ({"eos_token_id": TURN, "eot_token_id": TURN, "eom_token_id": MESSAGE}, {TURN, MESSAGE}),
        ({"eos_token_id": END, "eot_token_id": 2**32 - 1}, {END}),
    ],
)
def test_all_of_the_files_end_tokens_end_an_answer(tmp_path: Path, said: dict[str, int], ends: set[int]) -> None:
    model = load_model(str(write_gguf(tmp_path / "tiny.gguf", tiny_llama(), **said)))
    assert end_tokens(model) == ends


def test_an_answer_stops_at_the_end_of_a_turn(tmp_path: Path) -> None:
    endless = tiny_llama()
    endless.generation_config.eos_token_id = None
    text = endless.generate(torch.tensor([[1, 2, 3]]), do_sample=False, max_new_tokens=20)[0, 3:].tolist()
    turn = text[4]
    path = write_gguf(tmp_path / "tiny.gguf", endless, eos_token_id=END, eot_token_id=turn)
    answer = decode(load_model(str(path)), None, [1, 2, 3], AUTOREGRESSIVE, 20).tokens
    assert answer == text[: text.index(turn) + 1]


STRETCHED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}),
    (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {"type": "yarn", "factor": 4.0, "original_context_length": 128},
    ),
    ({**LLAMA3, "factor": 8.0}, {}),
    ({**LLAMA3, "factor": 32.0}, {}),
]


def frequencies(lm: Any) -> torch.Tensor:
    return lm.model.rotary_emb.inv_freq


@pytest.mark.parametrize(("rope", "keys"), STRETCHED, ids=lambda given: given.get("rope_type"))
def test_a_position_encoding_is_stretched_as_the_file_says(tmp_path: Path, rope, keys) -> None:  # type: ignore[no-untyped-def]
    theta = {"rope_theta": 10000.0}
    lm = tiny_llama(rope_parameters=theta | rope, max_position_embeddings=16384)
    if rope["rope_type"] == "llama3":  # its files hold, by frequency, how often it is divided
        keys = {"freqs": frequencies(tiny_llama(rope_parameters=theta | {"rope_type": "default"})) / frequencies(lm)}
    loaded = load_model(str(write_gguf(tmp_path / "tiny.gguf", lm, rope=keys))).lm
    torch.testing.assert_close(frequencies(loaded), frequencies(lm))
    assert_holds(loaded, lm)


OTHERWISE = [
    {"freqs": torch.tensor([1.0, 3, 1, 9, 1, 1, 2, 1])},
    {"factors_long": torch.ones(8) * 2},
    {"type": "longrope", "factor": 2.0},
]


@pytest.mark.parametrize("rope", OTHERWISE, ids=lambda rope: next(iter(rope)))
def test_a_position_encoding_that_cannot_be_told_to_transformers_is_refused(tmp_path: Path, rope) -> None:  # type: ignore[no-untyped-def]
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), rope=rope)
    with pytest.raises(ModelError, match=r"tiny\.gguf': it stretches its position encoding \((rope_f|longrope)"):
        load_model(str(path))


def test_factors_of_one_and_no_scaling_are_plain(tmp_path: Path) -> None:
    lm = tiny_llama()
    path = write_gguf(tmp_path / "tiny.gguf", lm, rope={"freqs": torch.ones(8), "type": "none"})
    assert_holds(load_model(str(path)).lm, lm)
