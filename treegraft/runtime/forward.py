"""One model's forwards over the committed text and a draft tree's branches, with a cache that keeps both.

Target and medium drafter use the same class: the one verifies nodes, the other processes them.
"""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from treegraft.runtime.models import Model
from treegraft.runtime.tree import Paths

GROWTH = 256  # cache slots added at a time, in tokens


class SlotLayer(CacheLayerMixin):
    """A cache layer in a buffer that grows in blocks: a forward writes its slots in place, nothing is concatenated."""

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
            size = max(end, self.keys.shape[-2] * 3 // 2) + GROWTH
            self.keys, self.values = self._grown(self.keys, size), self._grown(self.values, size)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grown(self, buffer: torch.Tensor, size: int) -> torch.Tensor:
        grown = buffer.new_empty(*buffer.shape[:2], size, buffer.shape[-1])
        grown[:, :, : self.length] = buffer[:, :, : self.length]
        return grown

    def keep(self, start: int, slots: torch.Tensor) -> None:
        """Keep the first `start` slots and then `slots`, in that order; drop the rest."""
        end = start + len(slots)
        self.keys[:, :, start:end] = self.keys[:, :, slots]
        self.values[:, :, start:end] = self.values[:, :, slots]
        self.length = end

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


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
        base, lag = self.seen + len(self.slots), len(committed) - self.seen
        assert lag == 0 or not self.slots, "the lag is caught up in the first call of a round"
        total = base + lag + len(nodes)
        tokens = committed[self.seen :] + [paths.tokens[node] for node in nodes]
        positions = list(range(self.seen, len(committed))) + [len(committed) + paths.depths[node] for node in nodes]
        for offset, node in enumerate(nodes):
            self.slots[node] = base + lag + offset
        device, dtype = self.model.device, self.model.lm.dtype
        mask = None
        if len(nodes) > 1 or self.slots.keys() - nodes:  # else plain causal attention, which the model masks itself
            mask = self._mask(lag, len(committed), paths, nodes, total).to(device=device)
            mask = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(~mask, torch.finfo(dtype).min)
        output = self.model.lm(
            input_ids=torch.tensor([tokens], device=device),
            attention_mask=mask,
            position_ids=torch.tensor([positions], device=device),
            cache=self.cache,
            use_cache=True,
            logits_to_keep=len(nodes),
        )
        self.seen = len(committed)
        return output.logits[0]

    def _mask(self, lag: int, prefix: int, paths: Paths, nodes: list[int], total: int) -> torch.Tensor:
        """What may be seen, boolean, shape (1, 1, lag + len(nodes), total)."""
        visible = torch.zeros(lag + len(nodes), total, dtype=torch.bool)
        visible[:, :prefix] = True
        if lag:
            visible[:lag, prefix - lag : prefix] = torch.ones(lag, lag, dtype=torch.bool).tril()
        rows, columns = [], []
        for row, node in enumerate(nodes, start=lag):
            while node >= 0:
                rows.append(row)
                columns.append(self.slots[node])
                node = paths.parents[node]
        visible[rows, columns] = True
        return visible[None, None]

    @torch.inference_mode()
    def commit(self, path: list[int]) -> None:
        """End the round: keep the slots of the longest processed prefix of `path` (root first), drop the others."""
        kept = []
        for node in path:
            if node not in self.slots:
                break
            kept.append(self.slots[node])
        if self.slots:
            index = torch.tensor(kept, dtype=torch.long, device=self.model.device)
            for layer in self.cache.layers:
                layer.keep(self.seen, index)  # type: ignore[union-attr]
        self.seen += len(kept)
        self.slots = {}
