"""Linear layers laid out for a few rows give the same products, and copies of them are plain layers."""

import copy
import multiprocessing
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import greedy, prompts, same_text
from torch import nn

import treegraft
from treegraft.runtime import packed

PROMPTS = prompts(3, seed=5)[1:]


@pytest.mark.parametrize("dtype", packed.LEAST_ROWS)
@pytest.mark.parametrize("rows", [1, 3, 4, 9, 70])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("least", [1, 4])
def test_a_packed_layer_gives_the_plain_product(monkeypatch, dtype, rows, bias, least):
    monkeypatch.setitem(packed.LEAST_ROWS, dtype, least)
    torch.manual_seed(0)
    plain = nn.Linear(48, 80, bias=bias, dtype=dtype).requires_grad_(False)
    inputs = torch.randn(1, rows, 48, dtype=dtype)
    made = packed.PackedLinear(plain)(inputs)
    assert made.shape == (1, rows, 80)
    exact = nn.functional.linear(inputs.double(), plain.weight.double(), plain.bias.double() if bias else None)
    assert torch.allclose(made.double(), exact, atol=1e-5 if dtype == torch.float32 else 2e-2)


def test_a_copy_can_be_changed():
    layer = packed.PackedLinear(nn.Linear(8, 8).requires_grad_(False))
    twin = copy.deepcopy(nn.Sequential(layer))[0]
    assert type(twin) is nn.Linear
    twin.weight.zero_()
    assert layer.weight.abs().sum() > 0
    assert torch.equal(twin.double()(torch.ones(5, 8, dtype=torch.float64)), twin.bias.expand(5, 8))


MUTATIONS = {
    "in place": lambda lm: [weight.mul_(1.3) for weight in lm.parameters()],
    "by its data, as adapters are merged": lambda lm: [setattr(w, "data", w.data.mul_(1.3)) for w in lm.parameters()],
    "in place by its data": lambda lm: [weight.data.mul_(1.3) for weight in lm.parameters()],
    "one row by its data": lambda lm: [weight.data[-2].mul_(3.0) for weight in lm.parameters()],
    "one column by its data": lambda lm: [w.data[..., 3].mul_(3.0) for w in lm.parameters()],
    "another storage": lambda lm: [setattr(weight, "data", weight.data * 1.3) for weight in lm.parameters()],
    "a state dict": lambda lm: lm.load_state_dict({name: w * 1.3 for name, w in lm.state_dict().items()}),
    "a state dict, assigned": lambda lm: lm.load_state_dict(
        {name: w * 1.3 for name, w in lm.state_dict().items()}, assign=True
    ),
    "a step of training": lambda lm: train(lm),
    "float64": lambda lm: lm.to(torch.float64),
    "bfloat16": lambda lm: lm.to(torch.bfloat16),
    "float16": lambda lm: lm.to(torch.float16),
    "float32": lambda lm: lm.to(torch.float32),
    "another device and back": lambda lm: elsewhere(lm),
}


def train(lm: Any) -> None:
    for weight in lm.parameters():
        weight.requires_grad_(True)
    optimizer = torch.optim.SGD(lm.parameters(), 0.1)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9]])
    lm(input_ids=ids, labels=ids).loss.backward()
    assert all(layer.weight.grad is not None for layer in lm.modules() if isinstance(layer, nn.Linear))
    optimizer.step()
    lm.requires_grad_(False)


def elsewhere(lm: Any) -> None:
    """To a device without numbers; what comes back has others, where the old ones lay or elsewhere."""
    state = {name: weight * 0.8 for name, weight in lm.state_dict().items()}
    lm.to_empty(device="meta")
    lm.to_empty(device="cpu")
    lm.load_state_dict(state)
    for module in lm.modules():  # rotary encodings are in no state dict
        if hasattr(module, "original_inv_freq"):
            frequencies, _ = module.compute_default_rope_parameters(module.config)
            module.inv_freq.copy_(frequencies)
            module.original_inv_freq.copy_(frequencies)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(changes=st.lists(st.sampled_from(sorted(MUTATIONS)), min_size=1, max_size=4), autocast=st.booleans())
def test_whatever_was_done_to_a_model_its_text_is_that_of_the_same_model_unpacked(pair, changes, autocast):
    target, _ = pair("llama")
    model = replace(target, lm=copy.deepcopy(target.lm))
    packed.pack_linears(model.lm)
    assert any(type(layer) is packed.PackedLinear for layer in model.lm.modules())
    for change in changes:
        decoder = treegraft.Decoder(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            ours = [decoder.generate(prompt, 6).tokens for prompt in PROMPTS]
            own = [greedy(model, prompt, 6) for prompt in PROMPTS]
        plain = replace(model, lm=copy.deepcopy(model.lm))
        assert not any(type(layer) is packed.PackedLinear for layer in plain.lm.modules())
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = [model.lm(torch.tensor([prompt])).logits for prompt in PROMPTS]
            exact = [plain.lm(torch.tensor([prompt])).logits for prompt in PROMPTS]
            references = [greedy(plain, prompt, 6) for prompt in PROMPTS]
        coarse = autocast or model.lm.dtype in (torch.bfloat16, torch.float16)
        for found, wanted in zip(logits, exact):
            assert torch.allclose(found.float(), wanted.float(), atol=0.1 if coarse else 1e-3)
        if not coarse:
            assert all(same_text(plain, *texts) for texts in zip(PROMPTS, ours, references))
            assert all(same_text(plain, *texts) for texts in zip(PROMPTS, own, references))
        MUTATIONS[change](model.lm)


def test_a_weight_whose_changes_are_not_counted_is_multiplied_as_it_is():
    layer, inputs = packed.PackedLinear(nn.Linear(8, 8).requires_grad_(False)), torch.randn(5, 8)
    with torch.inference_mode():
        layer.weight = nn.Parameter(torch.zeros(8, 8), requires_grad=False)
        assert torch.equal(layer(inputs), layer.bias.expand(5, 8))
        layer.weight.fill_(1.0)
        assert torch.allclose(layer(inputs), inputs.sum(1, keepdim=True) + layer.bias, atol=1e-5)


def test_a_packed_model_is_saved_pickled_and_sent_as_a_plain_one(pair, tmp_path):
    target, _ = pair("llama")
    lm = copy.deepcopy(target.lm)
    packed.pack_linears(lm)
    torch.save(lm, tmp_path / "whole.pt")
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        (sent,) = pool.map(copy.copy, [lm])
    copies = [torch.load(tmp_path / "whole.pt", weights_only=False), pickle.loads(pickle.dumps(lm)), sent]
    ids = torch.tensor([PROMPTS[0]])
    for twin in copies:
        assert not any(type(layer) is packed.PackedLinear for layer in twin.modules())
        assert torch.allclose(twin(ids).logits, lm(ids).logits, atol=1e-4)
    assert any(type(layer) is packed.PackedLinear for layer in lm.modules())


def test_gradients_go_through_a_packed_layer_as_through_a_plain_one():
    torch.manual_seed(0)
    layer = packed.PackedLinear(nn.Linear(8, 8).requires_grad_(False))
    inputs = torch.randn(5, 8, requires_grad=True)
    layer(inputs).square().sum().backward()
    wanted = torch.autograd.grad((inputs @ layer.weight.T + layer.bias).square().sum(), inputs)[0]
    assert torch.allclose(inputs.grad, wanted, atol=1e-5)


def test_only_what_gains_is_packed(monkeypatch):
    lm = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.float64), nn.LayerNorm(8)).requires_grad_(False)
    monkeypatch.setattr(packed, "MOST_BYTES", 8 * 8 * 4 - 1)
    packed.pack_linears(lm)
    assert type(lm[0]) is nn.Linear
    monkeypatch.setattr(packed, "MOST_BYTES", 8 * 8 * 4)
    packed.pack_linears(lm)
    assert [type(module) for module in lm] == [packed.PackedLinear, nn.Linear, nn.LayerNorm]


@pytest.mark.parametrize(("processor", "elsewhere"), [("vendor_id : GenuineIntel", False), ("AuthenticAMD", True)])
def test_mkl_is_at_home_on_one_makers_processors(monkeypatch, tmp_path, processor, elsewhere):
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(packed, "Path", lambda _: cpuinfo)
    monkeypatch.setattr(packed.platform, "processor", lambda: processor)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert packed.mkl_elsewhere() == elsewhere
    cpuinfo.write_text(processor)
    monkeypatch.setattr(packed.platform, "processor", lambda: "")
    assert packed.mkl_elsewhere() == elsewhere
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not packed.mkl_elsewhere()
