"""Whether two texts part at a float tie is checked in float64 without a second model, and no check costs its caller."""

import copy
from types import SimpleNamespace

import psutil
import pytest
import torch
from tiny import ARCHITECTURES, config, save_lm
from transformers import AutoModelForCausalLM

from treegraft.runtime.models import Model, load_model
from treegraft.runtime.packed import PackedLinear, pack_linears
from treegraft.runtime.ties import compare_texts, in_float64

PROMPT = [5, 6, 7, 5, 6, 7, 5]


def logits(lm) -> torch.Tensor:  # type: ignore[no-untyped-def]
    with torch.inference_mode():
        return lm(torch.tensor([PROMPT]), use_cache=False).logits


@pytest.fixture
def tied(tmp_path) -> tuple[Model, int, int]:  # type: ignore[no-untyped-def]
    """A target and the two tokens that it scores best after PROMPT, exactly alike."""
    target = load_model(str(save_lm(tmp_path / "target", config("llama"), seed=3)))
    best, other = logits(target.lm)[0, -1].topk(2).indices.tolist()
    plain = copy.deepcopy(target.lm.get_output_embeddings())
    plain.weight[other] = plain.weight[best]
    target.lm.set_output_embeddings(plain)
    return target, best, other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [*ARCHITECTURES, "mixtral", "tied embeddings", "dynamic rotary embeddings"])
def test_weights_cast_as_they_are_needed_give_a_float64_models_own_logits(kind: str, dtype: torch.dtype) -> None:
    more: dict = {"num_local_experts": 4} if kind == "mixtral" else {}
    if kind == "tied embeddings":
        more = {"tie_word_embeddings": True}
    if kind == "dynamic rotary embeddings":
        more = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    torch.manual_seed(0)
    settings = config(kind if " " not in kind else "llama", **more)
    lm = (
        AutoModelForCausalLM.from_config(settings, dtype=dtype, attn_implementation="sdpa").eval().requires_grad_(False)
    )
    doubled = copy.deepcopy(lm).double()
    doubled.set_experts_implementation("eager")
    pack_linears(lm)
    before = logits(lm)
    assert torch.equal(logits(in_float64(lm)), logits(doubled))
    assert torch.equal(logits(lm), before) and before.dtype == dtype  # and the model itself is as it was


def test_one_layer_at_a_time_is_held_in_float64(pair) -> None:  # type: ignore[no-untyped-def]
    lm = in_float64(pair("llama")[0].lm)
    held = []
    for module in lm.modules():
        module.register_forward_pre_hook(
            lambda *_: held.append(sum(p.dtype == torch.float64 for m in lm.modules() for p in m._parameters.values()
                                       if p is not None))
        )  # fmt: skip
    logits(lm)
    assert max(held) == 1
    own = {parameter.data_ptr() for parameter in pair("llama")[0].lm.parameters()}
    assert {parameter.data_ptr() for parameter in lm.parameters()} == own


def test_a_packed_layers_copy_shares_its_weight(pair) -> None:  # type: ignore[no-untyped-def]
    lm = pair("llama")[0].lm
    assert any(isinstance(module, PackedLinear) for module in lm.modules())
    assert not any(isinstance(module, PackedLinear) for module in in_float64(lm).modules())


def test_a_check_that_memory_does_not_allow_leaves_a_difference_unconfirmed(tied, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    target, best, other = tied
    third = int(logits(target.lm)[0, -1].topk(3).indices[2])
    assert compare_texts(target, PROMPT, [best, 1], [other, 2]) == "tie"
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
    with pytest.warns(UserWarning, match=f"{target.name}.* part after 0 tokens .*MemoryError: .* GiB in float64"):
        assert compare_texts(target, PROMPT, [best, 1], [other, 2]) == "unconfirmed"
    # What needs no such check is told as ever.
    assert compare_texts(target, PROMPT, [best], [best]) == "equal"
    assert compare_texts(target, PROMPT, [best], [third]) == compare_texts(target, PROMPT, [best], []) == "different"


def test_a_check_that_fails_leaves_a_difference_unconfirmed(tied) -> None:  # type: ignore[no-untyped-def]
    target, best, other = tied

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    target.lm.base_model.register_forward_pre_hook(fail)
    with pytest.warns(UserWarning, match="OutOfMemoryError: tried to allocate 9 GiB"):
        assert compare_texts(target, PROMPT, [best], [other]) == "unconfirmed"


@pytest.mark.filterwarnings("ignore:whether two texts")
def test_scores_that_are_no_numbers_are_no_tie(tied) -> None:  # type: ignore[no-untyped-def]
    target, best, other = tied
    target.lm.get_output_embeddings().weight[[best, other]] = torch.nan
    assert compare_texts(target, PROMPT, [best], [other]) in ("different", "unconfirmed")
