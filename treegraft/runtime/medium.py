"""The medium drafter: a causal LM that processes tree paths and scores their next tokens."""

import math
from bisect import bisect_left

import torch

from treegraft.runtime.forward import TreeForward
from treegraft.runtime.models import Model
from treegraft.runtime.tree import Paths


class LMDrafter:
    """Holds the log-probabilities of the paths processed in this round, over its draft vocabulary.

    Of one tokenizer a target and its drafter may embed different numbers of ids, since either may be padded: `embeds`
    are the target's. What only the drafter embeds is never proposed; what only the target embeds never reaches the
    drafter. A path whose scores are no numbers has no likeliest tokens, and no log-probabilities. `calls` and `tokens`
    (lag included) count what it was asked to forward since it was made.
    """

    def __init__(self, model: Model, embeds: int):
        self.forward = TreeForward(model, model.embeds)
        self.calls = 0
        self.tokens = 0
        vocabulary = model.draft_vocabulary
        self._vocabulary: list[int] | None = None if vocabulary is None else vocabulary.tolist()
        self._column: dict[int, int] | None = None
        if self._vocabulary is not None:
            self._column = {token: i for i, token in enumerate(self._vocabulary)}
        self._columns = embeds if self._vocabulary is None else bisect_left(self._vocabulary, embeds)
        self._blocks: list[torch.Tensor] = []  # log-probabilities, one block a call, shape (nodes, V)
        self._row: dict[int, tuple[int, int]] = {}  # path -> block and row in it
        self._best: dict[int, list[tuple[int, float]]] = {}

    def lag(self, committed: list[int]) -> int:
        """Committed tokens before the root that it has not processed."""
        return len(committed) - self.forward.seen

    def process(self, committed: list[int], paths: Paths, nodes: list[int], children: int) -> None:
        """Forward the paths in `nodes` (ancestors first) in one call, catching up with `committed` on the way."""
        self.calls += 1
        self.tokens += self.lag(committed) + len(nodes)
        logits = self.forward(committed, paths, nodes)[:, : self._columns]
        log_p = torch.log_softmax(logits.float(), dim=-1)
        top = log_p.topk(min(children, log_p.shape[-1]), dim=-1)
        # Read at once, since the host waits each time; columns are exact in float32.
        values, columns = torch.stack([top.values, top.indices.to(log_p.dtype)]).tolist()
        for row, (node, best, chosen) in enumerate(zip(nodes, values, columns)):
            self._row[node] = (len(self._blocks), row)
            tokens = map(int, chosen)
            if self._vocabulary is not None:
                tokens = map(self._vocabulary.__getitem__, tokens)
            self._best[node] = [(token, value) for token, value in zip(tokens, best) if not math.isnan(value)]
        self._blocks.append(log_p)

    def processed(self, path: int) -> bool:
        return path in self._row

    def top(self, path: int, count: int) -> list[tuple[int, float]]:
        return self._best[path][:count]

    def log_p(self, path: int, tokens: list[int]) -> list[float | None]:
        if not tokens:
            return []
        index, row = self._row[path]
        block = self._blocks[index] = self._blocks[index].cpu()  # fetched once, for all questions that follow
        columns = tokens if self._column is None else [self._column.get(token, -1) for token in tokens]
        columns = [column if column < block.shape[1] else -1 for column in columns]
        values = block[row, columns].tolist()  # -1 reads the last column, and is dropped here
        return [None if column < 0 or math.isnan(value) else value for value, column in zip(values, columns)]

    def rewind(self, length: int) -> None:
        """Keep at most the first `length` committed tokens, for another text that begins with them."""
        self.forward.rewind(length)
        self._blocks, self._row, self._best = [], {}, {}

    def commit(self, path: list[int]) -> None:
        """End the round; `path` is what was committed (path ids, root first)."""
        self.forward.commit(path)
        if not all(self._best.values()):  # scores that were no numbers must not show in later forwards
            self.forward.forget(self.forward.seen)
        self._blocks, self._row, self._best = [], {}, {}
