"""The two kinds of drafting step (spec section 2), and the options that shape a draft tree."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from treegraft.runtime.tree import DraftTree, Paths


@dataclass(frozen=True)
class Drafting:
    """What shapes the trees of a round; recorded in every log and artifact.

    depth: drafting steps a round (K). width: frontier nodes a step (W). children: next tokens a frontier node (m).
    budget: verification nodes beside the root (B). pool: tree nodes a medium call may process (C, None: no limit).
    medium_calls: medium steps a round (None: no limit).
    """

    depth: int = 5
    width: int = 4
    children: int = 4
    budget: int = 24
    pool: int | None = None
    medium_calls: int | None = None

    def __post_init__(self) -> None:
        for name, low, high in (("depth", 0, 16), ("width", 1, 1024), ("children", 1, 1024), ("budget", 1, 4096)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"--{name} is {value}; it must be between {low} and {high}")
        for name in ("pool", "medium_calls"):
            value = getattr(self, name)
            least = 1 if name == "pool" else 0
            if value is not None and value < least:
                raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")

    def may_call(self, mask: int) -> bool:
        """Whether the medium steps already taken (the set bits of `mask`) leave room for another."""
        return self.medium_calls is None or mask.bit_count() < self.medium_calls

    @property
    def schedules(self) -> int:
        """How many masks a round may follow: 2^K, or fewer with a limit of medium steps."""
        most = self.depth if self.medium_calls is None else min(self.depth, self.medium_calls)
        return sum(math.comb(self.depth, calls) for calls in range(most + 1))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class SmallDrafter(Protocol):
    """A cheap proposer."""

    def propose(self, paths: Paths, path: int, count: int) -> list[tuple[int, float]]:
        """At most `count` next tokens after a path, each with its log-probability."""
        ...


class MediumDrafter(Protocol):
    """A dearer proposer; it answers for paths that it has processed."""

    def top(self, path: int, count: int) -> list[tuple[int, float]]:
        """The `count` likeliest next tokens after a processed path, with their log-probabilities."""
        ...

    def log_p(self, path: int, tokens: list[int]) -> list[float | None]:
        """Log-probabilities of `tokens` after a processed path; None for one outside the draft vocabulary."""
        ...


def small_step(
    tree: DraftTree, paths: Paths, small: SmallDrafter, medium: MediumDrafter | None, drafting: Drafting
) -> None:
    """Expand Top_W(N_k) with the small drafter; `medium` gives its p for children of nodes that it processed."""
    frontier = tree.top(tree.new, drafting.width)
    proposals = [(node, small.propose(paths, tree.path[node], drafting.children)) for node in frontier]
    _attach(tree, paths, proposals, "small", medium)


def plan_medium(tree: DraftTree, drafting: Drafting) -> list[int]:
    """The nodes that a medium step has to process now, ancestors first; empty: nothing to do, no call, no cost.

    These are the unprocessed proper ancestors of pool nodes (they rescore their children) and the pool's leaves, save
    leaves that W pool nodes of final s certainly precede; at most `drafting.pool` of them, best s first.
    """
    pool = tree.pool()
    final = sorted(tree.rank(node) for node in pool if _final(tree, node))
    last_certain = final[drafting.width - 1] if len(final) >= drafting.width else None
    required = set()
    for node in pool:
        if not tree.processed[node]:
            # A leaf's s can rise, but never above that of its nearest ancestor-or-self whose s is final.
            bound = node
            while not _final(tree, bound):
                bound = tree.parent[bound]
            best = (-tree.log_s[bound], tree.depth[node], node)
            if tree.children[node] or last_certain is None or best <= last_certain:
                required.add(node)
        ancestor = tree.parent[node]
        while ancestor >= 0 and not tree.processed[ancestor]:
            required.add(ancestor)
            ancestor = tree.parent[ancestor]
    # Along a path s never grows, so the first C in this order are closed under unprocessed ancestors.
    planned = tree.top(list(required), drafting.pool or len(required))
    return sorted(planned)


def medium_step(
    tree: DraftTree, paths: Paths, planned: list[int], medium: MediumDrafter, drafting: Drafting
) -> list[int]:
    """Rescore with the planned nodes (which `medium` has just processed), reselect and graft; returns the frontier."""
    pool = tree.pool()
    for node in planned:
        tree.processed[node] = True
        children = tree.children[node]
        for child, log_p in zip(children, medium.log_p(tree.path[node], [tree.token[c] for c in children])):
            if log_p is not None:
                tree.log_p[child] = min(log_p, 0.0)
    tree.rescore()
    # With a limit C some pool nodes have no logits yet; a node whose parent has none either waits outside P.
    entered = [node for node in pool if node == 0 or tree.processed[tree.parent[node]]]
    frontier = tree.top([node for node in entered if tree.processed[node]], drafting.width)
    for node in entered:
        tree.visited[node] = True
    proposals = [(node, medium.top(tree.path[node], drafting.children)) for node in frontier]
    _attach(tree, paths, proposals, "medium", medium)
    return frontier


def _final(tree: DraftTree, node: int) -> bool:
    """Whether a node's s is made of medium probabilities throughout (the root's is)."""
    return node == 0 or tree.processed[tree.parent[node]]


def _attach(
    tree: DraftTree,
    paths: Paths,
    proposals: list[tuple[int, list[tuple[int, float]]]],
    proposer: str,
    medium: MediumDrafter | None,
) -> None:
    """Graft the proposed children; they form N_{k+1}, save those expanded in this same step."""
    expanded = {node for node, _ in proposals}
    attached: dict[int, None] = {}  # in order, each once
    raised = False
    for node, tokens in proposals:
        for token, log_p in tokens:
            child = tree.find_child(node, token)
            if child is None:
                path = paths.child(tree.path[node], token)
                if proposer == "small" and medium is not None and tree.processed[node]:
                    known = medium.log_p(tree.path[node], [token])[0]
                    log_p = log_p if known is None else known
                child = tree.add(node, token, min(log_p, 0.0), path, proposer)
            elif not tree.processed[node] and log_p > tree.log_p[child]:
                tree.log_p[child] = min(log_p, 0.0)
                raised = True
            if child not in expanded:
                attached[child] = None
    tree.new = list(attached)
    if raised:
        tree.rescore()
