"""Forwards of a few fixed shapes for CUDA, each captured once as a graph and replayed from then on.

A forward over a draft tree is some hundred kernels of a few microseconds, and launching them one by one takes longer
than they do. A CUDA graph launches them at once; its shapes and addresses are fixed and the host reads nothing inside.
So trees are padded to a few sizes, the cache is read up to a few lengths, and all that differs from one forward to the
next comes in one tensor: `inputs`, int64 of shape (4 + W, n), with n columns of a token's id, its position, the slot
that it is written to, the number of slots that it sees before its branch, and the W slots of its branch.
"""

import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from treegraft.runtime.cache import Captured, SlotCache

DEVICES = ("cuda",)  # where padding pays; elsewhere a forward takes time for every token
SIZES = (1, 4, 8, 16, 32, 64)  # tokens of a forward; more are not padded
LEAST_BRANCH = 8  # slots of a branch: the root and 7 steps
LEAST_LENGTH = 256  # slots of the cache that a forward reads; else a power of two

Step = Callable[[torch.Tensor], torch.Tensor]

_idle: weakref.WeakKeyDictionary[PreTrainedModel, list[SlotCache]] = weakref.WeakKeyDictionary()


def is_static(lm: PreTrainedModel) -> bool:
    """Whether the forwards of `lm` take fixed shapes: where it lies on one device for which that pays."""
    devices = {parameter.device for parameter in lm.parameters()}
    return len(devices) == 1 and devices.pop().type in DEVICES


def padded_size(tokens: int) -> int | None:
    """The tokens of a padded forward; None where there are too many to pad."""
    return next((size for size in SIZES if size >= tokens), None)


def padded_length(slots: int) -> int:
    """The slots to read where `slots` are in use."""
    return max(LEAST_LENGTH, _power_of_two(slots))


def padded_branch(slots: int) -> int:
    """The slots to name in a branch of `slots`."""
    return max(LEAST_BRANCH, _power_of_two(slots))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def to_device(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Integers as a tensor on `device`; the host does not wait until it is there."""
    tensor = torch.tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def borrow_cache(owner: object, lm: PreTrainedModel) -> SlotCache:
    """A cache for `owner`, with the graphs of an earlier text's where one is idle; idle again once `owner` is gone."""
    weights = tuple(parameter.data_ptr() for parameter in lm.parameters())
    idle = _idle.setdefault(lm, [])
    while idle:
        cache = idle.pop()
        if cache.weights == weights:  # else they have moved, and its graphs read where they were
            break
    else:
        cache = SlotCache(lm.config.num_hidden_layers)
        cache.weights = weights
    weakref.finalize(owner, idle.append, cache).atexit = False
    return cache


def replay(step: Step, inputs: torch.Tensor, cache: SlotCache) -> torch.Tensor:
    """`step(inputs)`, by the graph of these shapes where there is one; valid until the next forward of that shape.

    The first time the step is captured. Where that is refused, it runs as it is from then on, with one warning.
    """
    if inputs.device.type != "cuda":
        return step(inputs)
    key = (*inputs.shape, cache.slots.read)
    held = cache.captured.get(key)
    if held is None:
        pool = next((other.graph.pool() for other in cache.captured.values() if other.graph is not None), None)
        held = cache.captured[key] = _capture(step, inputs, pool)
    if held.graph is None or held.logits is None:
        return step(inputs)
    held.inputs.copy_(inputs)
    held.graph.replay()
    return held.logits


class Capturable(TorchDispatchMode):
    """While it is entered, an operation that no CUDA graph can hold raises RuntimeError, on any device.

    Those are the ones whose result, or its shape, the host has to read, and copies from one device to another.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        reads = func is torch.ops.aten.is_nonzero.default or not _READ.isdisjoint(func.tags)
        if func is torch.ops.aten.index.Tensor:  # by position its shape is known, by a mask it is not
            reads = any(index.dtype is torch.bool for index in args[1] if index is not None)
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        if reads or len({tensor.device for tensor in tensors if tensor.dim()}) > 1:
            raise RuntimeError(f"{func} makes the host wait")
        return result


_READ = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Where all graphs of a device are captured; graphs that share memory must share it."""
    return torch.cuda.Stream(device)


def _capture(step: Step, inputs: torch.Tensor, pool: Any) -> Captured:
    """Warm up, then capture into `pool`; a step may run any number of times: it writes the same slots each time."""
    held, stream = Captured(inputs.clone()), _side_stream(inputs.device)
    with torch.cuda.device(inputs.device):
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                step(held.inputs)  # libraries allocate what they keep
                with Capturable():  # a capture that breaks off would leave the allocator with loose ends
                    step(held.inputs)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                held.logits = step(held.inputs)
            held.graph = graph
        except RuntimeError as error:
            warnings.warn(f"a model's forwards run without CUDA graphs, more slowly: {error}", stacklevel=2)
        finally:
            torch.cuda.current_stream().wait_stream(stream)
    return held
