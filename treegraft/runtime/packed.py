"""Linear layers for the few rows of a draft tree on a CPU.

A plain weight matrix suits one row or hundreds of rows: for the 4 to 30 nodes of a verification, its product takes two
to three times a single row's time. oneDNN multiplies by a weight that was blocked once, at load, in little more than
the time of one row, in the same precision. Where a plain product runs in MKL on another maker's processor than Intel's,
even a single row takes twice as long as by oneDNN. On other devices nothing is done.
"""

import copy
import platform
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def mkl_elsewhere() -> bool:
    """Whether plain products are MKL's, on a processor that is not Intel's."""
    cpuinfo = Path("/proc/cpuinfo")
    said = cpuinfo.read_text() if cpuinfo.exists() else platform.processor()
    return torch.backends.mkl.is_available() and "GenuineIntel" not in said


ROWS = 8  # what the blocked weight is laid out for
# From so many rows on, the blocked weight is the faster one. By rule, not by a trial, so that equal runs round equally.
LEAST_ROWS = {torch.float32: 1 if mkl_elsewhere() else 4, torch.bfloat16: 1}
MOST_BYTES = 2**31  # of weights; a second copy of more would take memory that its user may need


class PackedLinear(nn.Linear):
    """A frozen linear layer on a CPU, with a blocked copy of its weight for inputs of several rows."""

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        if input.numel() < LEAST_ROWS[self.weight.dtype] * self.in_features:
            return F.linear(input, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        """A plain layer: a copy is made to be changed, and a blocked weight cannot be."""
        plain = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        plain.weight, plain.bias = copy.deepcopy(self.weight, memo), copy.deepcopy(self.bias, memo)
        return plain


def pack_linears(lm: nn.Module) -> None:
    """Replace the linear layers of `lm` where that pays: on a CPU with oneDNN, in float32 or bfloat16."""
    if not torch.backends.mkldnn.is_available():
        return
    supported = {torch.float32} | ({torch.bfloat16} if torch.ops.mkldnn._is_mkldnn_bf16_supported() else set())
    found = [
        (module, name, child)
        for module in lm.modules()
        for name, child in module.named_children()
        if type(child) is nn.Linear and child.weight.device.type == "cpu" and child.weight.dtype in supported
    ]
    if sum(child.weight.nbytes for _, _, child in found) <= MOST_BYTES:
        for module, name, child in found:
            setattr(module, name, PackedLinear(child))
