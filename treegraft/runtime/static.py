"""Forwards of a few fixed shapes for CUDA, each captured once as a graph and replayed from then on.

A forward over a draft tree is some hundred kernels of a few microseconds, and launching them one by one takes longer
than they do. A CUDA graph launches them at once; its shapes and addresses are fixed and the host reads nothing inside.
So trees are padded to a few sizes, the cache is read up to a few lengths, and all that differs from one forward to the
next comes in one tensor: `inputs`, int64 of shape (4 + W, n), with n columns of a token's id, its position, the slot
that it is written to, the number of slots that it sees before its branch, and the W slots of its branch.
"""

import functools
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from treegraft.runtime.cache import Captured, SlotCache, new_cache

DEVICES = ("cuda",)  # where padding pays; elsewhere a forward takes time for every token
SIZES = (1, 4, 8, 16, 32, 64)  # tokens of a forward; more are not padded
LEAST_BRANCH = 8  # slots of a branch: the root and 7 steps
LEAST_LENGTH = 256  # slots of the cache that a forward reads; else a power of two

Step = Callable[[torch.Tensor], torch.Tensor]

_idle: weakref.WeakKeyDictionary[PreTrainedModel, SlotCache] = weakref.WeakKeyDictionary()
_captured_seconds = 0.0  # in this process


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
    tensor = torch.tensor(values, device="cpu")
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def borrow_cache(owner: object, lm: PreTrainedModel) -> SlotCache:
    """A cache for `owner`, with the graphs of an earlier text's where one is idle; idle again once `owner` is gone."""
    cache, built_in = _idle.pop(lm, None), _built_in(lm)
    if cache is None or cache.built_in != built_in:
        cache = new_cache(lm)
        cache.built_in = built_in
    cache.clear(0)
    weakref.finalize(owner, _give_back, weakref.ref(lm), cache).atexit = False
    return cache


def _give_back(of: "weakref.ref[PreTrainedModel]", cache: SlotCache) -> None:
    """Keep one idle cache a model, the longest: each holds device memory."""
    if (lm := of()) is not None:
        other = _idle.get(lm)
        if other is None or other.slots.held <= cache.slots.held:
            _idle[lm] = cache


def release(lm: PreTrainedModel) -> None:
    """Let go of the cache that is idle."""
    _idle.pop(lm, None)


def refresh(cache: SlotCache, lm: PreTrainedModel) -> None:
    """End the graphs of a model that is no longer what they were captured from."""
    if (built_in := _built_in(lm)) != cache.built_in:
        cache.captured.clear()
        cache.built_in = built_in


def _built_in(lm: PreTrainedModel) -> tuple[Any, ...]:
    """What the graphs of a model have built in: where its tensors lie, its modes, hooks and adapters."""
    found: list[Any] = [tensor.data_ptr() for tensor in (*lm.parameters(), *lm.buffers())]
    for module in lm.modules():
        found += (module.training, *module._forward_hooks, *module._forward_pre_hooks)
        adapters = (getattr(module, name, None) for name in ("_active_adapter", "_disable_adapters", "merged_adapters"))
        found += map(str, adapters)
    return tuple(found)


def seconds() -> float:
    """A clock like time.perf_counter that stands still while a graph is captured: that is paid once, by no round."""
    return time.perf_counter() - _captured_seconds


def replay(step: Step, inputs: torch.Tensor, cache: SlotCache) -> torch.Tensor:
    """`step(inputs)`, by the graph of these shapes where there is one; valid until the cache's next forward.

    The first time the step is captured. Where that is refused, the cache's forwards run as they are, with one warning.
    """
    global _captured_seconds
    if inputs.device.type != "cuda" or cache.refused:
        return step(inputs)
    key = (*inputs.shape, cache.slots.read)
    held = cache.captured.get(key)
    if held is None:
        began = time.perf_counter()
        pool = next((other.graph.pool() for other in cache.captured.values()), None)
        held = _capture(step, inputs, pool)
        _captured_seconds += time.perf_counter() - began
        if held is None:
            cache.refused = True
            return step(inputs)
        cache.captured[key] = held
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
        if func.overloadpacket in _BY_INDEX:  # by position a shape is known, by a mask it is not
            reads = any(index.dtype in (torch.bool, torch.uint8) for index in args[1] if index is not None)
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        # A kernel may read a number that lies on the host; a copy of one makes the host wait.
        least = 0 if func.overloadpacket in _COPIES else 1
        if reads or len({tensor.device for tensor in tensors if tensor.dim() >= least}) > 1:
            raise RuntimeError(f"{func} makes the host wait")
        return result


_READ = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_BY_INDEX = {getattr(torch.ops.aten, name) for name in ("index", "index_put", "index_put_", "_unsafe_index_put")}
_COPIES = {torch.ops.aten._to_copy, torch.ops.aten.copy_}


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Where all graphs of a device are captured; graphs that share memory must share it."""
    return torch.cuda.Stream(device)


def _capture(step: Step, inputs: torch.Tensor, pool: Any) -> Captured | None:
    """Warm up, then capture into `pool`; None, with a warning, where that is refused.

    A step may run any number of times: it writes the same slots each time.
    """
    inputs, stream = inputs.clone(), _side_stream(inputs.device)
    with torch.cuda.device(inputs.device):
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                step(inputs)  # libraries allocate what they keep
                with Capturable():  # a capture that breaks off would leave the allocator with loose ends
                    step(inputs)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                logits = step(inputs)
            return Captured(graph, inputs, logits)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            warnings.warn(f"a model's forwards run without CUDA graphs, more slowly: {error}", stacklevel=2)
            return None
        finally:
            torch.cuda.current_stream().wait_stream(stream)
