"""All schedules of one text position at once: fork every invoke-or-skip decision (spec section 5)."""

from collections.abc import Callable
from dataclasses import dataclass
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


def fork_position(
    paths: Paths,
    committed: list[int],
    small: NGramDrafter,
    medium: LMDrafter,
    drafting: Drafting,
    state: Callable[[Fork, int, int], signals.State],
) -> tuple[list[dict[str, Any]], list[Fork]]:
    """The logged signals of every decision point, and the leaves: one fork per schedule.

    Goes breadth-first, so that the forks of a step share one medium forward over the union of their unprocessed paths:
    K forwards for all 2^K schedules. `state(fork, step, planned)` describes a fork before a decision.
    """
    decisions = []
    forks = [Fork(0, DraftTree(token=[paths.tokens[0]]))]
    for step in range(1, drafting.depth + 1):
        plans = [plan_medium(fork.tree, drafting) for fork in forks]
        for fork, planned in zip(forks, plans):
            decisions.append(signals.compute(signals.LOGGED, state(fork, step, len(planned))))
        calling = [(fork, planned) for fork, planned in zip(forks, plans) if drafting.may_call(fork.mask)]
        wanted = {fork.tree.path[node] for fork, planned in calling for node in planned}
        if todo := sorted(path for path in wanted if not medium.processed(path)):
            medium.process(committed, paths, todo, drafting.children)
        invoked = []
        for fork, planned in calling:
            tree = fork.tree.fork()
            medium_step(tree, paths, planned, medium, drafting)
            invoked.append(Fork(fork.mask | 1 << (step - 1), tree, (*fork.tokens, len(planned))))
        for fork in forks:
            small_step(fork.tree, paths, small, medium, drafting)
            fork.tokens += (0,)
        forks += invoked
    return decisions, forks


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
