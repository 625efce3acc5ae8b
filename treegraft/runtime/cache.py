"""A cache of keys and values in slots: a forward writes in place, where it is told to, and nothing is concatenated."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from treegraft.runtime.model import text_config


@dataclass
class Slots:
    """What the layers of a cache share: the slots that they hold, and what the next forward does with them.

    It follows `seen` tokens, writes its own into the slots `write`, and attends to the first `read` slots.
    """

    held: int
    seen: int
    write: slice | torch.Tensor
    read: int


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, each (batch, heads, slots, width)."""

    is_sliding = False

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self.keys: torch.Tensor
        self.values: torch.Tensor
        self.slots = slots

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = self._buffer(key_states), self._buffer(value_states)
        self.is_initialized = True

    def _buffer(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros, since a slot that is masked counts for nothing only where it holds a number.
        return like.new_zeros(*like.shape[:2], self.slots.held, like.shape[-1])

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):  # type: ignore[no-untyped-def]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys[:, :, self.slots.write] = key_states
        self.values[:, :, self.slots.write] = value_states
        return self.keys[:, :, : self.slots.read], self.values[:, :, : self.slots.read]

    def grow(self) -> None:
        """Hold as many slots as the cache now says, with what they held before."""
        if self.is_initialized:
            keys, values = self.keys, self.values
            self.lazy_initialization(keys, values)
            self.keys[:, :, : keys.shape[-2]] = keys
            self.values[:, :, : keys.shape[-2]] = values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.read, 0

    def get_seq_length(self) -> int:
        return self.slots.seen

    def get_max_length(self) -> int:
        return -1


@dataclass
class Captured:
    """A step's graph, with the inputs that it reads and the logits that it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor
    logits: torch.Tensor


class SlotCache(Cache):
    """A cache of `count` slot layers.

    `captured` are the CUDA graphs that read and write its buffers, by shape, unless graphs were `refused`, and
    `built_in` is what they hold of the model (see `static`).
    """

    layers: list[SlotLayer]  # type: ignore[assignment]

    def __init__(self, count: int) -> None:
        self.slots = Slots(0, 0, slice(0, 0), 0)
        self.captured: dict[tuple[int, ...], Captured] = {}
        self.refused = False
        self.built_in: tuple[Any, ...] = ()
        super().__init__(layers=[SlotLayer(self.slots) for _ in range(count)])

    def hold(self, slots: int) -> None:
        """Hold at least `slots` slots. New buffers lie elsewhere, which ends the captured graphs."""
        if slots > self.slots.held:
            self.slots.held = slots
            self.captured.clear()
            for layer in self.layers:
                layer.grow()

    @torch.inference_mode()
    def clear(self, start: int) -> None:
        """Make the slots from `start` on zeros, as new ones are."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys[:, :, start:] = 0
                layer.values[:, :, start:] = 0

    def move(self, sources: torch.Tensor, start: int) -> None:
        """Move the slots `sources` to `start` and the slots after it, in that order."""
        for layer in self.layers:
            if layer.is_initialized:  # one that shares another's keys has none
                for buffer in (layer.keys, layer.values):
                    buffer[:, :, start : start + len(sources)] = buffer[:, :, sources]


def new_cache(lm: PreTrainedModel) -> SlotCache:
    """An empty cache for the layers of `lm`."""
    return SlotCache(text_config(lm).num_hidden_layers)
