"""All schedules of some text positions at once: fork every invoke-or-skip decision (spec section 5)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from treegraft.runtime import signals
from treegraft.runtime.drafting import Drafting, medium_step, plan_medium, small_step
from treegraft.runtime.medium import LMDrafter
from treegraft.runtime.ngram import NGramDrafter
from treegraft.runtime.tree import DraftTree, Paths


@dataclass
class Fork:
    """A partial schedule: its earlier decisions as a mask, its tree, and the nodes each medium call processed."""

    mask: int
    tree: DraftTree
    tokens: tuple[int, ...] = ()


@dataclass
class Place:
    """A text position: its root's path, the small drafter as it stands there, and the forks so far.

    `decisions` are the logged signals of its decision points; at the end `forks` are the leaves, one a schedule.
    """

    position: int  # answer tokens before the root
    root: int
    small: NGramDrafter
    forks: list[Fork]
    decisions: list[dict[str, Any]] = field(default_factory=list)


def fork_places(
    places: list[Place],
    paths: Paths,
    committed: list[int],
    medium: LMDrafter,
    drafting: Drafting,
    state: Callable[[Place, Fork, int, int], signals.State],
) -> None:
    """Grow every schedule at every place, breadth-first by step; fills `decisions` and `forks`.

    All forks of all places share one medium forward a step. The places' roots lie on one path, the known text, so that
    a path of one place whose first tokens are that text is a path of a later place: it is processed once for both.
    `state(place, fork, step, planned)` describes a fork before a decision.
    """
    for step in range(1, drafting.depth + 1):
        plans = [[plan_medium(fork.tree, drafting) for fork in place.forks] for place in places]
        wanted: set[int] = set()
        for place, planned in zip(places, plans):
            for fork, nodes in zip(place.forks, planned):
                place.decisions.append(signals.compute(signals.LOGGED, state(place, fork, step, len(nodes))))
                if drafting.may_call(fork.mask):
                    wanted.update(fork.tree.path[node] for node in nodes)
        if todo := _unprocessed(wanted, paths, medium):
            medium.process(committed, paths, todo, drafting.children)
        for place, planned in zip(places, plans):
            invoked = []
            for fork, nodes in zip(place.forks, planned):
                if drafting.may_call(fork.mask):
                    tree = fork.tree.fork()
                    medium_step(tree, paths, nodes, medium, drafting)
                    invoked.append(Fork(fork.mask | 1 << (step - 1), tree, (*fork.tokens, len(nodes))))
                small_step(fork.tree, paths, place.small, medium, drafting)
                fork.tokens += (0,)
            place.forks += invoked


def _unprocessed(wanted: Iterable[int], paths: Paths, medium: LMDrafter) -> list[int]:
    """Those of `wanted` that the medium drafter has not processed, with such ancestors (the text's); parents first."""
    todo: set[int] = set()
    for path in wanted:
        while path >= 0 and path not in todo and not medium.processed(path):
            todo.add(path)
            path = paths.parents[path]
    return sorted(todo)


def leaf_facts(tree: DraftTree, tokens: tuple[int, ...], continuation: list[int], budget: int) -> dict[str, Any]:
    """What the log keeps of a leaf: ordered log s, ranks of the accepted nodes, q, and tokens per call.

    `continuation` is the known text after the root: the accepted path agrees with it, so no target forward is needed.
    """
    order = tree.ordered(budget)
    rank = {node: i for i, node in enumerate(order)}
    node, accepted, q = 0, [], 0
    for token in continuation:
        child = tree.find_child(node, token)
        if child is None or child not in rank:
            break
        accepted.append(rank[child])
        q += tree.processed[child]  # processed is closed under ancestors, so this counts a prefix
        node = child
    return {"log_s": [tree.log_s[n] for n in order], "accepted": accepted, "q": q, "tokens": list(tokens)}
