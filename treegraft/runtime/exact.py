"""Whether this machine's kernels give a token the same bits in any forward, as exact texts in 16 bits rest on.

The order of attention's sums is ours (see `attention`); that of a product's is the library's, and may go by the rows.
"""

import warnings
from contextlib import suppress
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from treegraft.runtime.attention import COARSE, Order, attending, can_order, ordered_attention
from treegraft.runtime.forward import TreeForward, alone
from treegraft.runtime.model import Model, text_config
from treegraft.runtime.packed import PackedLinear
from treegraft.runtime.tree import Paths
from treegraft.runtime.trial import shortened, small_tree

ROWS = (2, 5, 16, 25)  # tokens of a forward, whose rows are held against single ones


def check_rounding(name: str, lm: PreTrainedModel, dtype: torch.dtype) -> None:
    """Warn where texts of a model in bfloat16 or float16 may differ by schedule, and say why."""
    if dtype not in COARSE:
        return
    if not can_order(lm, dtype):
        differing = "attention, whose order of sums is kept on a CPU only"
    else:
        differing = ", ".join(_differing(lm, dtype))
    if differing:
        warnings.warn(
            f"model {name!r}: in {dtype} this machine rounds differently by the tokens of a forward ({differing}), so "
            "where two tokens all but tie, texts may differ by schedule; in float32 they hardly ever do",
            stacklevel=3,
        )


def _differing(lm: PreTrainedModel, dtype: torch.dtype) -> list[str]:
    """The operations of `lm` that give a row other bits beside others than alone."""
    layers: list[Any] = [layer for layer in lm.modules() if type(layer) in (nn.Linear, PackedLinear)]
    shapes_of = {tuple(layer.weight.shape): layer for layer in layers}
    found = [f"a product with {outs} x {ins} weights" for (outs, ins), layer in shapes_of.items() if not _keeps(layer)]
    if not (shapes := _ordered_shapes(lm)):
        found.append("attention of its own")
    elif not all(_attention_keeps(*shape, dtype) for shape in shapes):
        found.append("attention")
    if not found and not _layers_keep(shortened(lm) or lm):
        found.append("one of its other layers, experts perhaps")
    return found


@torch.inference_mode()
def _ordered_shapes(lm: PreTrainedModel) -> set[tuple[int, int, int]]:
    """Heads, key heads and width of the attention that keeps the order; none where that of `lm` is its own."""
    inputs = torch.tensor([0, 0, 0, 0, 0])[:, None]
    mask = torch.zeros(1, 1, 1, 1, dtype=lm.dtype)
    order = Order.make(inputs, mask)
    part: Any = shortened(lm) or lm
    with alone, attending(text_config(lm), order), suppress(Exception):  # a model's code may raise anything
        part(input_ids=inputs[:1], position_ids=inputs[1:2], attention_mask=mask, use_cache=False)
    return order.shapes


@torch.inference_mode()
def _layers_keep(lm: PreTrainedModel) -> bool:
    """Whether the nodes of a small tree have the logits of one-token steps."""
    _, text, path, logits = small_tree(lm)
    steps = TreeForward(Model("", lm, cast(Any, None), 0, ""))
    for row, end in zip(logits, range(3, 3 + len(path))):
        step = steps(text[:end], Paths(text[end], text[:end], 1), [0])[0]
        steps.commit([0])
        if not torch.equal(step.nan_to_num(), row.nan_to_num()):
            return False
    return True


@torch.inference_mode()
def _keeps(layer: nn.Linear) -> bool:
    rows = torch.randn(max(ROWS), layer.in_features, generator=torch.Generator().manual_seed(0)).to(layer.weight.dtype)
    alone = layer(rows[:1])
    return all(torch.equal(layer(rows[:count])[:1], alone) for count in ROWS)


@cache
@torch.inference_mode()
def _attention_keeps(heads: int, shared: int, width: int, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    for prefix in (20, 45, 90, 130, 190, 300, 517):
        query = torch.randn(1, heads, 9, width, generator=generator).to(dtype)
        key, value = (torch.randn(1, shared, prefix + 9, width, generator=generator).to(dtype) for _ in range(2))
        # A root with two branches, node by node beside each other; then the second branch as one-token steps.
        branches = [[0], *([0, *range(first, node + 1, 2)] for node in range(1, 9) for first in [2 - node % 2])]
        whole = ordered_attention(_order(prefix, branches, dtype), query, key, value, None)
        path = [prefix + slot for slot in branches[-1]]
        for depth, slot in enumerate(branches[-1]):
            kept = [*range(prefix), *path[: depth + 1]]
            alone = _order(prefix + depth, [[0]], dtype)
            step = ordered_attention(alone, query[:, :, slot : slot + 1], key[:, :, kept], value[:, :, kept], None)
            if not torch.equal(step[0, 0], whole[0, slot]):
                return False
    return True


def _order(prefix: int, branches: list[list[int]], dtype: torch.dtype) -> Order:
    """The order of nodes with these branches, by slot after `prefix` committed tokens."""
    width = max(map(len, branches))
    columns = []
    for branch in branches:
        slots = [prefix + slot for slot in branch]
        columns.append([0, prefix + len(branch) - 1, slots[-1], prefix, *slots, *slots[-1:] * (width - len(slots))])
    return Order.make(torch.tensor(columns).T, torch.zeros(1, dtype=dtype))
