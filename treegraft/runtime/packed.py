"""Linear layers for the few rows of a draft tree on a CPU.

A plain weight matrix suits one row or hundreds of rows: for the 4 to 30 nodes of a verification, its product takes two
to three times a single row's time. oneDNN multiplies by a weight that was blocked once, at load, in little more than
the time of one row, in the same precision. Where a plain product runs in MKL on another maker's processor than Intel's,
even a single row takes twice as long as by oneDNN. On other devices nothing is done.
"""

import functools
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
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
SAMPLE = 16  # values of a weight, along its diagonal, that are held against what they were
MANY_ROWS = 32  # of inputs, as prompts have: their product takes so long that a thorough look is nothing
MOST_BYTES = 2**31  # of weights; a second copy of more would take memory that its user may need


@dataclass(frozen=True)
class Packed:
    """A weight blocked for a few rows, and what that weight was then."""

    blocked: torch.Tensor
    weight: nn.Parameter
    version: int
    pointer: int
    # What a few of its values were, and one of every row and column: a change through `.data`, as adapters are merged,
    # counts as no new version.
    few: np.ndarray  # a view of the weight's memory
    few_held: bytes
    numbers: np.ndarray  # the weight's memory as integers
    diagonal: np.ndarray  # indices
    diagonal_held: np.ndarray

    def is_of(self, weight: torch.Tensor, thoroughly: bool) -> bool:
        """Whether `weight` is still the one that was blocked, by one value of each row and column or by a few."""
        return (
            weight is self.weight
            and weight._version == self.version
            and weight.data_ptr() == self.pointer
            and self.few.tobytes() == self.few_held
            and (not thoroughly or np.array_equal(self.numbers.take(self.diagonal), self.diagonal_held))
        )


def pack(weight: Any) -> Packed | None:
    """The blocked `weight`; None for one that has to be multiplied as it is."""
    if type(weight) is not nn.Parameter or not packable(weight):
        return None
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
    numbers = weight.detach().view(torch.int32 if weight.dtype == torch.float32 else torch.int16)  # numpy's own
    rows, columns = weight.shape
    few = numbers[:: max(1, rows // SAMPLE), :: max(1, columns // SAMPLE)].diagonal().numpy()
    longest = np.arange(max(rows, columns))
    diagonal, flat = longest % rows * columns + longest % columns, numbers.flatten().numpy()
    return Packed(blocked, weight, weight._version, weight.data_ptr(), few, few.tobytes(), flat, diagonal,
                  flat.take(diagonal))  # fmt: skip


def packable(weight: torch.Tensor) -> bool:
    """Whether oneDNN multiplies by such a weight: an ordinary one on a CPU, in float32 or (if native) bfloat16."""
    return (
        torch.backends.mkldnn.is_available()
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and weight.numel() > 0
        and not weight.is_inference()  # its changes are not counted
        and (weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and _native_bfloat16()))
    )


@functools.cache
def _native_bfloat16() -> bool:
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


class PackedLinear(nn.Linear):
    """A linear layer with a blocked copy of its weight for inputs of several rows.

    It behaves as the layer that it replaced. The copy follows the weight; gradients, autocast and whatever else wants
    the weight itself get it; and what is copied or pickled is a plain layer.
    """

    def __init__(self, linear: nn.Linear):
        self.__dict__.update(linear.__dict__)
        self.packed = pack(linear.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        weight, bias = self.weight, self.bias
        if input.numel() < LEAST_ROWS.get(weight.dtype, 1) * self.in_features or not _is_plain(input, weight):
            return F.linear(input, weight, bias)
        packed = self.packed
        if packed is None or not packed.is_of(weight, thoroughly=input.numel() >= MANY_ROWS * self.in_features):
            packed = self.packed = pack(weight)
        if packed is None:
            return F.linear(input, weight, bias)
        return torch.ops.mkldnn._linear_pointwise(input, packed.blocked, bias, "none", [], "")

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in self.__getstate__().items() if name != "packed"}
        return _new_linear, (), state


def _new_linear() -> nn.Linear:
    return nn.Linear.__new__(nn.Linear)


def _is_plain(input: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a product is numbers in, numbers out, in one precision."""
    return not (
        input.dtype != weight.dtype
        or torch.is_autocast_enabled("cpu")
        or (torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad))
        or type(input) is not torch.Tensor
        or torch.compiler.is_compiling()
    )


def repack(lm: nn.Module) -> None:
    """Look thoroughly whether weights were changed, as before a text, and block those anew."""
    for layer in lm.modules():
        if isinstance(layer, PackedLinear) and (layer.packed is None or not layer.packed.is_of(layer.weight, True)):
            layer.packed = pack(layer.weight)


def pack_linears(lm: nn.Module) -> None:
    """Replace the linear layers of `lm` where that pays: on a CPU with oneDNN, in float32 or bfloat16."""
    found = [
        (module, name, child)
        for module in lm.modules()
        for name, child in module.named_children()
        if type(child) is nn.Linear and packable(child.weight)
    ]
    if sum(child.weight.nbytes for _, _, child in found) <= MOST_BYTES:
        for module, name, child in found:
            setattr(module, name, PackedLinear(child))
