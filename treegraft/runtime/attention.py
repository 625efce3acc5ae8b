"""Attention over a draft tree: every token sees the committed text, its ancestors and itself.

In float32 trees of different shapes round differently in the last bits, which shows only where two tokens tie. In
bfloat16 and float16 that happens every few tokens, so there the sums of a token's attention are taken in an order that
its position alone decides, whatever tree it came in: see `Order`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

# A token at position p takes the keys before its last 16 to 31 from the committed text, the others from its own path: a
# branch is 17 slots long at most, the root and 16 steps.
BLOCK = 16
ROWS = 16  # of queries that the kernel takes at once: it sums in the same order where they are equally many

COARSE = (torch.bfloat16, torch.float16)  # precisions whose rounding shows in texts

_branching = ContextVar("_branching", default=False)
_order: ContextVar["Order | None"] = ContextVar("_order", default=None)


@dataclass
class Order:
    """How the tokens of a forward attend so that no bit depends on the tree: each in two parts, fixed by its position.

    With b = BLOCK * max(0, position // BLOCK - 1), the first b keys lie in the first b slots, and the next 2 * BLOCK,
    gathered from the token's own path, in its `slots`; those past its position are hidden by `mask`.
    """

    groups: list[tuple[int, torch.Tensor | None]]  # b, and the tokens that it is of, None for all; without b = 0
    slots: torch.Tensor  # (n * 2 * BLOCK,)
    mask: torch.Tensor  # (n, 1, 1, 2 * BLOCK), added to the scores
    tree: torch.Tensor  # the forward's whole mask: attention that changed it, as by a bias, cannot go by an order
    shapes: set[tuple[int, int, int]] = field(default_factory=set)  # heads, key heads and width of those that took it

    @classmethod
    def make(cls, inputs: torch.Tensor, tree: torch.Tensor) -> "Order":
        """The order for a forward's inputs (see `static`), whose branches begin with the root, and its tree mask."""
        positions, seen, branches = inputs[1], inputs[3], inputs[4:].T
        begins = BLOCK * (positions // BLOCK - 1).clamp(min=0)
        at = begins[:, None] + torch.arange(2 * BLOCK, device=inputs.device)
        below = (at - seen[:, None]).clamp(0, branches.shape[1] - 1)
        slots = torch.where(at < seen[:, None], at, branches.gather(1, below))
        mask = torch.zeros(at.shape, dtype=tree.dtype, device=inputs.device)
        mask.masked_fill_(at > positions[:, None], torch.finfo(tree.dtype).min)
        groups: list[tuple[int, torch.Tensor | None]] = []
        for begin in begins.unique().tolist():
            tokens = (begins == begin).nonzero()[:, 0]
            if begin:
                groups.append((begin, tokens if len(tokens) < len(begins) else None))
        return cls(groups, slots.flatten(), mask[:, None, None], tree)


def can_order(lm: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Whether the forwards of `lm` take an order: where rounding is coarse, and the kernel is known to keep it."""
    return dtype in COARSE and all(weight.device.type == "cpu" for weight in lm.parameters())


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """Attention under a tree mask without copying the cache: query heads that share a key head become rows.

    query (batch, heads, n, width); key and value (batch, key heads, total, width), as the cache holds them;
    attention_mask (1, 1, n, total). Returns (batch, n, heads, width). A forward of another thread that meets it here,
    while the model is shared, gets torch's attention as ever.
    """
    if not _branching.get():
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    assert attention_mask is not None
    for name in ("position_bias", "softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"a model whose attention has a {name} cannot branch over a draft tree")
    order = _order.get()
    if order is not None and _same(attention_mask, order.tree):
        return ordered_attention(order, query, key, value, scaling), None
    batch, heads, count, width = query.shape
    rows, mask = query.reshape(batch, key.shape[1], -1, width), attention_mask.repeat(1, 1, heads // key.shape[1], 1)
    output = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(batch, heads, count, -1).transpose(1, 2).contiguous(), None


def _same(mask: torch.Tensor, given: torch.Tensor) -> bool:
    return mask.shape == given.shape and mask.data_ptr() == given.data_ptr()


AttentionInterface.register("treegraft", tree_attention)
# Never None: another thread's forward may take its mask here and go on with eager attention, which would see all.
AttentionMaskInterface.register("treegraft", eager_mask)


def ordered_attention(
    order: Order, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Attention in an order that a token's position decides; shapes as `tree_attention`'s, batch 1."""
    _, heads, count, width = query.shape
    shared = key.shape[1]
    order.shapes.add((heads, shared, width))
    rows = query[0].unflatten(0, (shared, -1)).transpose(1, 2)  # the query heads of a key head are rows side by side
    own_key, own_value = (part[0].index_select(1, order.slots).view(shared, count, 2 * BLOCK, -1).transpose(0, 1)
                          for part in (key, value))  # fmt: skip
    output, sums = _attend(rows.transpose(0, 1), own_key, own_value, scaling, order.mask)
    output = output.float()
    for begin, tokens in order.groups:
        mine = rows if tokens is None else rows.index_select(1, tokens)
        far, far_sums = _attend_in_rows(mine, key[:, :, :begin], value[:, :, :begin], scaling)
        near, near_sums = (output, sums) if tokens is None else (output[tokens], sums[tokens])
        share = 1 / (1 + torch.exp(near_sums - far_sums))  # of the scores' exponentials; a sigmoid rounds by its place
        merged = torch.lerp(near, far.float(), share[..., None])
        if tokens is None:
            output = merged
        else:
            output[tokens] = merged
    return output.to(query.dtype).reshape(1, count, heads, -1)


def _attend_in_rows(
    rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_attend` of tokens (key heads, n, heads of each, width) to the same keys, ROWS rows at a time; n comes first."""
    shared, count, heads, width = rows.shape
    flat = rows.reshape(shared, count * heads, width)
    if missing := -flat.shape[1] % ROWS:
        flat = torch.cat([flat, flat.new_zeros(shared, missing, width)], dim=1)
    calls = flat.view(shared, -1, ROWS, width).transpose(0, 1)
    output, sums = _attend(calls, key.expand(len(calls), -1, -1, -1), value.expand(len(calls), -1, -1, -1), scaling)
    output, sums = (part.transpose(0, 1).flatten(1, 2)[:, : count * heads] for part in (output, sums))
    return output.unflatten(1, (count, heads)).transpose(0, 1), sums.unflatten(1, (count, heads)).transpose(0, 1)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, as `query`, and the logarithms of what the softmax divided by, float32 without the last dimension."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    mask = None if mask is None else mask.to(query.dtype).expand(-1, -1, query.shape[2], -1)
    output, sums = flash(query, key, value, attn_mask=mask, scale=scaling)
    return output, sums


@contextmanager
def attending(config: Any, order: Order | None = None) -> Iterator[None]:
    """Tree attention for the forwards inside; the model is shared with `generate`, which keeps its own."""
    own, branching, ordered = config._attn_implementation, _branching.set(True), _order.set(order)
    config._attn_implementation = "treegraft"
    try:
        yield
    finally:
        config._attn_implementation = own
        _branching.reset(branching)
        _order.reset(ordered)


def tree_mask(seen: torch.Tensor, branches: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the attention scores, (1, 1, n, length): token i sees `seen[i]` slots and those of its branch.

    seen (n,); branches (n, W), slots of which some may be named twice.
    """
    mask = torch.full((len(seen), length), torch.finfo(dtype).min, dtype=dtype, device=seen.device)
    mask.masked_fill_(torch.arange(length, device=seen.device) < seen[:, None], 0)
    return mask.scatter_(1, branches, 0)[None, None]
