"""One model's forwards over the committed text and a draft tree's branches, with a cache that keeps both.

Target and medium drafter use the same class: the one verifies nodes, the other processes them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from treegraft.runtime.models import Model
from treegraft.runtime.tree import Paths

GROWTH = 64  # cache slots added at a time, in tokens
LONG_LAG = 64  # tokens; more are caught up without a mask, whose size is their square


class SlotLayer(CacheLayerMixin):
    """A cache layer in a buffer that grows in blocks: a forward writes its slots in place, nothing is concatenated.

    At most GROWTH slots more than were ever in use at once are held.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.keys: torch.Tensor  # (batch, heads, size, width), of which `length` slots are in use
        self.values: torch.Tensor
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, heads, _, width = key_states.shape
        self.keys = key_states.new_empty(batch, heads, 0, width)
        self.values = value_states.new_empty(batch, heads, 0, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):  # type: ignore[no-untyped-def]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        if end > self.keys.shape[-2]:
            size = end + GROWTH
            self.keys, self.values = self._grown(self.keys, size), self._grown(self.values, size)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grown(self, buffer: torch.Tensor, size: int) -> torch.Tensor:
        grown = buffer.new_empty(*buffer.shape[:2], size, buffer.shape[-1])
        grown[:, :, : self.length] = buffer[:, :, : self.length]
        return grown

    def keep(self, start: int, slots: torch.Tensor | None = None) -> None:
        """Keep the first `start` slots and then `slots`, in that order; drop the rest."""
        self.length = start
        if slots is not None:
            self.length += len(slots)
            self.keys[:, :, start : self.length] = self.keys[:, :, slots]
            self.values[:, :, start : self.length] = self.values[:, :, slots]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention under a tree mask without copying the cache: query heads that share a key head become rows.

    query (batch, heads, n, width); key and value (batch, key heads, total, width), as the cache holds them;
    attention_mask (1, 1, n, total). Returns (batch, n, heads, width).
    """
    if kwargs.get("position_bias") is not None:
        raise NotImplementedError("a model with an attention bias of its own cannot branch over a draft tree")
    batch, heads, count, width = query.shape
    rows, mask = query.reshape(batch, key.shape[1], -1, width), attention_mask.repeat(1, 1, heads // key.shape[1], 1)
    output = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(batch, heads, count, -1).transpose(1, 2), None


AttentionInterface.register("treegraft", tree_attention)


@contextmanager
def _attending(config: Any) -> Iterator[None]:
    """Tree attention for the forwards inside; the model is shared with `generate`, which keeps its own."""
    own = config._attn_implementation
    config._attn_implementation = "treegraft"
    try:
        yield
    finally:
        config._attn_implementation = own


class TreeForward:
    """A model with its cache: `seen` committed tokens first, then one slot for each processed path of this round."""

    def __init__(self, model: Model):
        self.model = model
        self.seen = 0
        self.slots: dict[int, int] = {}
        self.cache = Cache(layers=[SlotLayer() for _ in range(model.lm.config.num_hidden_layers)])

    @torch.inference_mode()
    def __call__(self, committed: list[int], paths: Paths, nodes: list[int]) -> torch.Tensor:
        """Process the committed tokens not seen yet and the paths `nodes` (ancestors first); logits (len(nodes), V).

        `committed` are all tokens before the root. A node attends to them, to its ancestors and to itself; its
        position is the root's plus its depth (spec section 3).
        """
        lag = len(committed) - self.seen
        assert lag == 0 or not self.slots, "the lag is caught up in the first call of a round"
        branched = len(nodes) > 1 or bool(self.slots)
        if branched and lag > LONG_LAG:
            self._catch_up(committed)
            lag = 0
        base = len(committed) + len(self.slots)
        for slot, node in enumerate(nodes, start=base):
            self.slots[node] = slot
        tokens = committed[self.seen :] + [paths.tokens[node] for node in nodes]
        positions = list(range(self.seen, len(committed))) + [len(committed) + paths.depths[node] for node in nodes]
        inputs = self._inputs(tokens, positions) | {"logits_to_keep": len(nodes)}
        if branched:
            mask = self._mask(lag, len(committed), paths, nodes, base + len(nodes))
            with _attending(self.model.lm.config):
                output = self.model.lm(**inputs, attention_mask=mask.to(self.model.device))
        else:
            output = self.model.lm(**inputs)  # plain causal attention, which the model masks itself
        self.seen = len(committed)
        return output.logits[0]

    def _catch_up(self, committed: list[int]) -> None:
        """Process the committed tokens not seen yet, with no mask, and no head either: nobody reads their logits."""
        self.model.lm.base_model(**self._inputs(committed[self.seen :], list(range(self.seen, len(committed)))))
        self.seen = len(committed)

    def _inputs(self, tokens: list[int], positions: list[int]) -> dict[str, Any]:
        device = self.model.device
        return {
            "input_ids": torch.tensor([tokens], device=device),
            "position_ids": torch.tensor([positions], device=device),
            "cache": self.cache,
            "use_cache": True,
        }

    def _mask(self, lag: int, prefix: int, paths: Paths, nodes: list[int], total: int) -> torch.Tensor:
        """Added to the attention scores, shape (1, 1, lag + len(nodes), total)."""
        dtype = self.model.lm.dtype
        hidden = torch.finfo(dtype).min
        mask = torch.zeros(lag + len(nodes), total, dtype=dtype)
        mask[:, prefix:] = hidden
        if lag:
            mask[:lag, prefix - lag : prefix] = torch.full((lag, lag), hidden, dtype=dtype).triu(1)
        rows, columns = [], []
        for row, node in enumerate(nodes, start=lag):
            while node >= 0:
                rows.append(row)
                columns.append(self.slots[node])
                node = paths.parents[node]
        mask[rows, columns] = 0
        return mask[None, None]

    def rewind(self, length: int) -> None:
        """Keep at most the first `length` committed tokens, and no node."""
        self.seen = min(self.seen, length)
        self.slots = {}
        for layer in self.cache.layers:
            layer.keep(self.seen)  # type: ignore[union-attr]

    @torch.inference_mode()
    def commit(self, path: list[int]) -> None:
        """End the round: keep the slots of the longest processed prefix of `path` (root first), drop the others."""
        moved = list[int]()
        for node in path:
            if node not in self.slots:
                break
            if moved or self.slots[node] != self.seen:
                moved.append(self.slots[node])
            else:
                self.seen += 1  # it is where it belongs, as the root always is
        if self.slots:
            index = torch.tensor(moved, device=self.model.device) if moved else None
            for layer in self.cache.layers:
                layer.keep(self.seen, index)  # type: ignore[union-attr]
        self.seen += len(moved)
        self.slots = {}
