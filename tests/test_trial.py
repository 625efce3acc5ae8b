"""Whether a model can branch over a draft tree is found by trying, once, before any text is decoded."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VOCABULARY, config, greedy, prompts, random_lm, save_lm, tokenizer
from transformers import AutoConfig

import treegraft
from treegraft.runtime import trial
from treegraft.runtime.decode import ContextError, Plan, decode
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.forward import TreeForward
from treegraft.runtime.models import ModelError, load_model, wrap_model
from treegraft.runtime.scheduler import Mask
from treegraft.runtime.size import Cut
from treegraft.runtime.tree import Paths

PLANS = [Plan(bin(mask), Mask(mask), Drafting(depth=3, width=3, children=3), Cut("none")) for mask in (0, 0b010, 0b111)]


SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = SMALL | {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}
RECURRENT: list[tuple[str, dict[str, Any]]] = [
    ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    ("mamba2", {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 4}),
    ("recurrent_gemma", {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}),
    ("rwkv", {"hidden_size": 32, "num_hidden_layers": 2}),
    ("qwen3_next", GROUPED | {"num_hidden_layers": 4, "num_experts": 4, "moe_intermediate_size": 32}),
]  # fmt: skip
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("falcon", SMALL | {"alibi": True}),
    ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
    ("mpt", {"d_model": 64, "n_layers": 2, "n_heads": 4}),
    ("doge", GROUPED),
    ("gemma2", GROUPED | {"attn_implementation": "eager"}),
    ("gpt_oss", GROUPED | {"attn_implementation": "eager", "num_local_experts": 4, "num_experts_per_tok": 2}),
]


@pytest.mark.parametrize(("kind", "settings"), RECURRENT, ids=lambda value: value if isinstance(value, str) else "")
def test_a_recurrent_model_is_refused_with_the_reason(kind: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"cannot branch over a draft tree.* keeps a recurrent or compressed state"):
        wrap_model(random_lm(kind, **settings))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_that_adds_to_the_mask_goes_by_it(dtype: torch.dtype) -> None:
    settings = GROUPED | {"num_key_value_heads": 4}  # as many as query heads: a bias of each may be added
    lm = random_lm("doge", **settings).to(dtype)
    model = wrap_model(lm)
    forward, paths = TreeForward(model), Paths(9, [5, 6, 7, 8], 1)
    logits = forward([5, 6, 7, 8], paths, [0, paths.child(0, 1), paths.child(0, 2)])[2]
    with torch.inference_mode():
        own = lm(torch.tensor([[5, 6, 7, 8, 9, 2]]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(logits, own, atol=1e-3 if dtype == torch.float32 else 0.3, rtol=0)


def test_coarse_rounding_hides_no_small_fault() -> None:
    settings = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
    lm = random_lm("blenderbot-small", **settings).to(torch.bfloat16)
    with pytest.raises(ModelError, match="of their spread away"):  # positions that go by the cache, not by the node
        wrap_model(lm)


@pytest.mark.parametrize(("kind", "settings"), OTHERS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_model_that_cannot_branch_is_refused_by_name(kind: str, settings: dict[str, Any]) -> None:
    lm = random_lm(kind, **settings)
    with pytest.raises(ModelError, match=rf"model '{type(lm).__name__}' .*cannot branch over a draft tree: "):
        wrap_model(lm)
    ids = torch.tensor([[3, 1, 4]])
    with pytest.raises(ModelError, match="cannot branch"):
        lm.generate(
            ids,
            use_cache=True,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=4,
            custom_generate=treegraft.generate,
        )


def test_a_model_on_disk_is_refused_by_its_path(tmp_path: Path) -> None:
    random_lm("bloom", hidden_size=64, n_layer=2, n_head=4).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"model '{tmp_path}'"):
        load_model(str(tmp_path))


def test_attention_that_views_its_output_is_served() -> None:
    settings = GROUPED | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
    }
    model = wrap_model(random_lm("afmoe", **settings))
    for prompt in prompts(4):
        reference = greedy(model, prompt, 16)
        assert all(decode(model, model, prompt, plan, 16).tokens == reference for plan in PLANS)


COMPOSITE: list[tuple[str, dict[str, Any]]] = [
    ("gemma3", {"sliding_window": 64}),
    ("llama4", {"intermediate_size_mlp": 96, "num_local_experts": 2, "attention_chunk_size": 64, "moe_layers": []}),
]


@pytest.mark.parametrize(("kind", "text"), COMPOSITE, ids=lambda value: value if isinstance(value, str) else "")
def test_a_composite_checkpoint_goes_by_its_text_part(kind: str, text: dict[str, Any], tmp_path: Path) -> None:
    parts = AutoConfig.for_model(kind)
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
    }
    vision |= (
        {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32} if kind == "llama4" else {}
    )
    for part, settings in ((parts.text_config, GROUPED | {"vocab_size": VOCABULARY, "num_hidden_layers": 4} | text),
                           (parts.vision_config, vision)):  # fmt: skip
        for name, value in settings.items():
            setattr(part, name, value)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(part, name, None)
    kinds = list(dict.fromkeys(parts.text_config.layer_types))
    parts.text_config.layer_types = (kinds * 4)[:4]
    parts.text_config.max_position_embeddings = 512
    save_lm(tmp_path, parts, 0)
    model = load_model(str(tmp_path))
    assert model.context == 64  # of the window or chunk: beyond it the layers do not attend to all
    usual = copy.deepcopy(model.lm.config)
    for prompt in prompts(4):
        reference = greedy(model, prompt, 16)
        assert all(decode(model, model, prompt, plan, 16).tokens == reference for plan in PLANS)
    with pytest.raises(ContextError, match="64 tokens"):
        decode(model, None, [1] * 60, PLANS[0], 8)
    assert model.lm.config.to_dict() == usual.to_dict() and model.lm.config._attn_implementation == "sdpa"
    if hasattr(usual, "vision_config"):
        assert model.lm.config.vision_config._attn_implementation == usual.vision_config._attn_implementation


def test_a_model_in_training_is_refused(tmp_path: Path) -> None:
    lm = load_model(str(save_lm(tmp_path, config("llama", attention_dropout=0.5), 0))).lm
    with pytest.raises(ModelError, match=r"call its eval\(\)"):
        wrap_model(lm.train())
    wrap_model(lm.eval())


def test_a_model_is_tried_once(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = pair("llama")
    wrap_model(target.lm)
    monkeypatch.setattr(trial, "_difference", lambda lm: "tried again")
    wrap_model(target.lm)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("changed", [range(6), [3]], ids=["every layer", "one layer"])
def test_neither_name_nor_precision_hides_a_forward_that_mixes_branches(tmp_path: Path, changed, dtype: str) -> None:
    lm: Any = load_model(str(save_lm(tmp_path, config("llama", layers=6), 0)), dtype=dtype).lm
    for index in changed:
        attention = lm.model.layers[index].self_attn

        def mixing(*args: Any, own: Any = attention.forward, attention_mask: Any = None, **more: Any) -> Any:
            if attention_mask is not None:  # a tree's forward
                more["hidden_states"] = more["hidden_states"].roll(1, dims=1)
            return own(*args, attention_mask=attention_mask, **more)

        attention.forward = mixing
    trial._tried.clear()
    with pytest.raises(ModelError, match="of their spread away"):
        wrap_model(lm)


def test_a_few_layers_of_every_kind_are_tried(tmp_path: Path) -> None:
    lm: Any = load_model(str(save_lm(tmp_path, config("llama", layers=8), 0))).lm
    ran = []
    for index, layer in enumerate(lm.model.layers):
        layer.register_forward_pre_hook(lambda *_, index=index: ran.append(index))
    lm.model.layers[4].odd = True
    trial._tried.clear()
    wrap_model(lm)
    assert sorted(set(ran)) == [0, 1, 4, 7] and len(lm.model.layers) == 8
