"""One model's forwards over the committed text and a draft tree's branches, with a cache that keeps both.

Target and medium drafter use the same class: the one verifies nodes, the other processes them.
"""

import os
from collections.abc import Sequence
from threading import RLock
from typing import Any

import torch

from treegraft.runtime import static
from treegraft.runtime.attention import BLOCK, Order, attending, can_order, tree_mask
from treegraft.runtime.cache import new_cache
from treegraft.runtime.model import Model, rope_parameters, text_config
from treegraft.runtime.tree import Paths

GROWTH = 64  # cache slots added at a time, in tokens
LONG_LAG = 64  # tokens; more are caught up without a mask, whose size is their square
PIECE = 256  # tokens of a long lag that an ordered forward takes at a time

# One forward at a time in a process: they switch their model's attention, and graphs must be captured one by one.
alone = RLock()
if hasattr(os, "register_at_fork"):  # a child has no thread that could let go of it
    os.register_at_fork(after_in_child=alone._at_fork_reinit)  # type: ignore[attr-defined]


def reset_frequencies(lm: torch.nn.Module) -> None:
    """Undo what an earlier text has stretched: the next forward stretches it for its own length."""
    for module in lm.modules():
        if hasattr(module, "max_seq_len_cached"):
            for name, original in list(module.named_buffers(recurse=False)):
                if name.endswith("original_inv_freq"):
                    prefix = name.removesuffix("original_inv_freq")
                    module.register_buffer(f"{prefix}inv_freq", original.clone(), persistent=False)
                    setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


class TreeForward:
    """A model with its cache: `seen` committed tokens first, then one slot for each processed path of this round.

    `deepest` is how far below the root a path may reach, None for any depth. Of a drafter `embeds` says how many ids
    it embeds: the target's others take the place of id 0 in its forwards. On CUDA all forwards but a prompt's are
    padded to a few shapes and replayed as graphs (see `static`).
    """

    def __init__(self, model: Model, embeds: int | None = None):
        self.model = model
        self.embeds = embeds
        self.seen = 0
        self.slots: dict[int, int] = {}
        self.static = static.is_static(model.lm)
        self.ordered = not self.static and can_order(model.lm, model.lm.dtype)
        self.deepest = BLOCK if self.ordered else None
        self.config = text_config(model.lm)
        self.stretching = any(rope.get("rope_type") == "dynamic" for rope in rope_parameters(self.config))
        self.cache = static.borrow_cache(self, model.lm) if self.static else new_cache(model.lm)

    @torch.inference_mode()
    def __call__(self, committed: list[int], paths: Paths, nodes: list[int]) -> torch.Tensor:
        """Process the committed tokens not seen yet and the paths `nodes` (ancestors first); logits (len(nodes), V).

        `committed` are all tokens before the root. A node attends to them, to its ancestors and to itself; its
        position is the root's plus its depth (spec section 3). On CUDA the logits hold until the next call.
        """
        with alone:
            forward = self._stretched if self.stretching else self._forward
            return forward(committed, paths, nodes)

    def _forward(self, committed: list[int], paths: Paths, nodes: list[int]) -> torch.Tensor:
        lag = len(committed) - self.seen
        assert lag == 0 or not self.slots, "the lag is caught up in the first call of a round"
        branched = len(nodes) > 1 or bool(self.slots) or self.ordered
        most = PIECE if self.ordered else LONG_LAG
        if self.static:  # before the first padded forward a plain one makes the buffers
            most = max(static.SIZES[-1] - len(nodes), 0) if self.seen else 0
        if branched and lag > most:
            self._catch_up(committed, most)
            lag = len(committed) - self.seen
        start = self.seen + len(self.slots)
        for slot, node in enumerate(nodes, start=start + lag):
            self.slots[node] = slot
        count = lag + len(nodes)
        size = static.padded_size(count) if self.static and self.seen else None
        if size is not None:
            logits = self._padded(self._columns(committed, paths, nodes, size - count))[lag:count]
        elif branched:
            self._place(start, count)
            inputs = static.to_device(self._columns(committed, paths, nodes), self.model.device)
            logits = self._branch(inputs, len(nodes))
        else:  # plain causal attention, which the model masks itself
            root = paths.tokens[nodes[0]]
            logits = self.model.lm(**self._plain([*committed[self.seen :], root]), logits_to_keep=1).logits[0, -1:]
        self.seen = len(committed)
        return logits

    def _stretched(self, committed: list[int], paths: Paths, nodes: list[int]) -> torch.Tensor:
        """As `_forward` for frequencies that go by a forward's last position: past a length, depth by depth.

        One-token steps stretch them so; and `generate` would keep those of the longest text that it has seen.
        """
        reset_frequencies(self.model.lm)
        depths = [paths.depths[node] for node in nodes]
        if len(committed) + max(depths) < self.config.max_position_embeddings:
            return self._forward(committed, paths, nodes)
        rows: dict[int, torch.Tensor] = {}
        for depth in sorted(set(depths)):
            level = [node for node, at in zip(nodes, depths) if at == depth]
            rows |= zip(level, self._forward(committed, paths, level).clone())
            reset_frequencies(self.model.lm)
        return torch.stack([rows[node] for node in nodes])

    def _catch_up(self, committed: list[int], most: int) -> None:
        """Process committed tokens not seen yet, without the head, whose logits nobody reads, until at most `most` are.

        Where no order is kept all of them go at once, with no mask.
        """
        if not self.ordered:
            self.model.lm.base_model(**self._plain(committed[self.seen :]))
            self.seen = len(committed)
        while len(committed) - self.seen > most:
            end = self.seen + PIECE
            self._place(self.seen, PIECE)
            inputs = static.to_device(self._columns(committed[:end], Paths(0, [], 1), []), self.model.device)
            self._branch(inputs, None)
            self.seen = end

    def _plain(self, tokens: list[int]) -> dict[str, Any]:
        """Arguments of a forward over `tokens`, one after another, after those seen."""
        self._place(self.seen, len(tokens))
        positions = list(range(self.seen, self.seen + len(tokens)))
        inputs = static.to_device([self._embedded(tokens), positions], self.model.device)
        return self._arguments(inputs)

    def _arguments(self, inputs: torch.Tensor) -> dict[str, Any]:
        return {"input_ids": inputs[:1], "position_ids": inputs[1:2], "cache": self.cache, "use_cache": True}

    def _place(self, start: int, count: int) -> None:
        """The next forward writes `count` slots from `start` on and attends to all until their end."""
        end = start + count
        if end > self.cache.slots.held:
            self.cache.hold(static.padded_length(end) if self.static else end + GROWTH)
        slots = self.cache.slots
        slots.seen, slots.write, slots.read = start, slice(start, end), end

    def _columns(self, committed: list[int], paths: Paths, nodes: list[int], padding: int = 0) -> list[Sequence[int]]:
        """The rows of a branched forward's inputs (see `static`): lag, nodes, and `padding` that sees itself only."""
        prefix, lag = len(committed), committed[self.seen :]
        branches = []
        for node in nodes:
            branch = []
            while node >= 0:
                branch.append(self.slots[node])
                node = paths.parents[node]
            branches.append(branch[::-1])
        width = max(map(len, branches), default=1)
        if self.static:
            width = static.padded_branch(width)
        columns = [(token, slot, slot, slot, *[slot] * width) for slot, token in enumerate(lag, self.seen)]
        for node, branch in zip(nodes, branches):
            slot, repeated = branch[-1], [branch[-1]] * (width - len(branch))
            columns.append((paths.tokens[node], prefix + paths.depths[node], slot, prefix, *branch, *repeated))
        end = prefix + len(self.slots)
        columns += [(0, 0, slot, 0, *[slot] * width) for slot in range(end, end + padding)]
        ids, *others = zip(*columns)
        return [self._embedded(ids), *others]

    def _embedded(self, tokens: Sequence[int]) -> Sequence[int]:
        """`tokens`, with id 0 for what only the target embeds."""
        return tokens if self.embeds is None else [token if token < self.embeds else 0 for token in tokens]

    def _padded(self, rows: list[Sequence[int]]) -> torch.Tensor:
        """The logits of all columns of padded inputs."""
        end = rows[2][-1] + 1
        length = static.padded_length(end)
        self.cache.hold(length)
        self.cache.slots.read = length
        return static.replay(self._step, static.to_device(rows, self.model.device), self.cache)

    def _step(self, inputs: torch.Tensor) -> torch.Tensor:
        """A forward that only `inputs` and their shapes determine."""
        self.cache.slots.write = inputs[2]
        return self._branch(inputs, 0)

    def _branch(self, inputs: torch.Tensor, rows: int | None) -> torch.Tensor:
        """The last `rows` logits (0: all, None: the states before the head) of a forward under a tree mask."""
        mask = tree_mask(inputs[3], inputs[4:].T, self.cache.slots.read, self.model.lm.dtype)
        # Autocast mixes precisions, for which the order has no kernel.
        ordered = self.ordered and not torch.is_autocast_enabled(inputs.device.type)
        order = Order.make(inputs, mask) if ordered else None
        with attending(self.config, order):
            if rows is None:
                return self.model.lm.base_model(**self._arguments(inputs), attention_mask=mask)[0]
            output = self.model.lm(**self._arguments(inputs), attention_mask=mask, logits_to_keep=rows)
        return output.logits[0, -rows:]

    def rewind(self, length: int) -> None:
        """Keep at most the first `length` committed tokens, and no node."""
        if self.static:
            static.refresh(self.cache, self.model.lm)
        self.seen = min(self.seen, length)
        self.slots = {}

    def forget(self, length: int) -> None:
        """As `rewind`, after scores that were no numbers: padded forwards read all slots, and a NaN outdoes a mask."""
        self.rewind(length)
        self.cache.clear(self.seen)

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
        if moved:
            self.cache.move(static.to_device(moved, self.model.device), self.seen)
        self.seen += len(moved)
        self.slots = {}
