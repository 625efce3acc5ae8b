"""Linear layers laid out for a few rows give the same products, and copies of them are plain layers."""

import copy

import pytest
import torch
from torch import nn

from treegraft.runtime import packed


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
