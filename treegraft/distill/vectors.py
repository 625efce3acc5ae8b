"""Test vectors: tree states in plain numbers with their signals and decision, for whoever ports a scheduler.

The log holds signals, not trees. So random drafters grow trees by the decoder's own steps, contexts come from the log,
and a search bends the trees until every way to decide that the log knows has a state (spec section 7).
"""

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from treegraft.runtime.drafting import Drafting, medium_step, plan_medium, small_step
from treegraft.runtime.ngram import NGramDrafter
from treegraft.runtime.scheduler import Rules, Schedule, TreeModel
from treegraft.runtime.signals import compute
from treegraft.runtime.tree import DraftTree, Paths
from treegraft.runtime.verify import state_of, tree_of
from treegraft.value_system.replay import NAMES, Positions
from treegraft.value_system.value import States, features_at

VECTORS = 64  # at least
TRIES = 1500  # states tried for one way to decide
ROWS = 20  # of the log, kept for each way

Comparison = tuple[Any, str, float, bool]  # where in the schedule, signal, threshold, whether signal <= threshold
Way = tuple[int, tuple[Comparison, ...]]  # the step, and the comparisons that led to the decision
Row = dict[str, float]  # all signals at one decision point of the log


def vectors(schedule: Schedule, log: Positions, states: States, drafting: Drafting) -> list[dict[str, Any]]:
    """At least VECTORS test vectors; every way to decide that the log knows and a tree can reach has one.

    Each has a `state` (docs/artifact.md), every signal that the schedule reads, a tree's `margin`, and `invoke`.
    """
    dice = random.Random(0)
    known = _known(schedule, log, states)
    made = []
    for way, rows in known.items():
        if found := _search(schedule, way, rows, drafting, dice):
            made.append(found)
    everything = [row for rows in known.values() for row in rows]
    while len(made) < VECTORS:
        made.append(_vector(schedule, _state(dice.choice(everything), drafting, dice), drafting))
    return made


def way_of(schedule: Schedule, step: int, signals: dict[str, float]) -> Way:
    """How a decision comes about."""
    compared = _tree_comparisons(schedule, signals) if isinstance(schedule, TreeModel) else ()
    if isinstance(schedule, Rules):
        compared = _rule_comparisons(schedule, step, signals)
    return step, tuple(compared)


def _tree_comparisons(tree: TreeModel, signals: dict[str, float]) -> Iterator[Comparison]:
    node = 0
    while tree.feature[node] >= 0:
        name = tree.reads[tree.feature[node]]
        low = signals[name] <= tree.threshold[node]
        yield node, name, tree.threshold[node], low
        node = tree.left[node] if low else tree.right[node]


def _rule_comparisons(rules: Rules, step: int, signals: dict[str, float]) -> Iterator[Comparison]:
    for index, rule in enumerate(rules.rules):
        if rule.step == step:
            for place, (name, operator, threshold) in enumerate(rule.conditions):
                low = signals[name] <= threshold
                yield (index, place), name, threshold, low
                if low != (operator == "<="):
                    break
            else:
                return


def _known(schedule: Schedule, log: Positions, states: States) -> dict[Way, list[Row]]:
    """Every way to decide that the log knows, each with some of its rows."""
    known: dict[Way, list[Row]] = {}
    columns = [NAMES.index(name) for name in schedule.reads]
    for step in range(1, log.depth + 1):
        rows, masks = (index.ravel() for index in np.indices((len(log.position), 1 << (step - 1))))
        met = log.possible[rows, masks]  # no decision follows more medium calls than a round may have
        values = features_at(log, states, step, rows[met], masks[met])
        for index, read in enumerate(values[:, columns].tolist()):
            found = known.setdefault(way_of(schedule, step, dict(zip(schedule.reads, read))), [])
            if len(found) < ROWS:
                found.append(dict(zip(NAMES, values[index].tolist())))
    return known


def _search(schedule: Schedule, way: Way, rows: list[Row], drafting: Drafting, dice: random.Random) -> Any:
    """A test vector that decides in this way, or None: climb from random states towards its comparisons."""
    nearest, least = None, math.inf
    for attempt in range(TRIES):
        state = _bend(nearest, drafting, dice) if nearest and attempt % 4 else _state(dice.choice(rows), drafting, dice)
        made = _vector(schedule, state, drafting)
        missed = sum(_missed(made["signals"][name], threshold, low) for _, name, threshold, low in way[1])
        if not missed and way_of(schedule, state["step"], made["signals"]) == way:
            return made
        if missed < least:
            nearest, least = state, missed
    return None


def _missed(value: float, threshold: float, low: bool) -> float:
    """How far a value is on the wrong side of a threshold, relative to it."""
    if (value <= threshold) == low:
        return 0.0
    return 0.01 + abs(value - threshold) / (1 + abs(threshold))


def _vector(schedule: Schedule, state: dict[str, Any], drafting: Drafting) -> dict[str, Any]:
    signals = compute(schedule.reads, state_of(state, drafting.width))
    margin = {"margin": schedule.margin(signals)} if isinstance(schedule, TreeModel) else {}
    invoke = schedule.decide(state["step"], state["mask"], signals)
    return {"state": state, "signals": signals, **margin, "invoke": invoke}


def _state(row: Row, drafting: Drafting, dice: random.Random) -> dict[str, Any]:
    """A state with the context of a row of the log and a tree that random drafters grew."""
    tree = grow(int(row["step"]), int(row["mask"]), drafting, dice)
    longest = dice.randint(0, NGramDrafter.longest)
    match = [_match(dice, longest) for _ in range(len(tree))]
    match[0] = [max(0, round(row["root_match"])), _whole(row["root_recency"])]
    return {
        "step": int(row["step"]), "mask": int(row["mask"]), "prompt_length": _whole(row["log_prompt_length"]),
        "answer_position": int(row["answer_position"]), "target_entropy": float(f"{row['target_entropy']:.6g}"),
        "target_margin": float(f"{row['target_margin']:.6g}"), "lag": int(row["lag"]),
        "accepted": _accepted(round(row["accepted_last"]), row["accepted_mean4"]),
        "parent": tree.parent, "log_p": tree.log_p, "visited": [*map(int, tree.visited)],
        "processed": [*map(int, tree.processed)], "new": tree.new, "match": match,
        "planned": len(plan_medium(tree, drafting)),
    }  # fmt: skip


def _whole(log: float) -> int:
    """The count whose log1p this is."""
    return max(0, round(math.expm1(log)))


def _match(dice: random.Random, longest: int) -> list[int]:
    length = dice.randint(0, longest)
    return [length, round(math.exp(dice.uniform(0, 6)))] if length else [0, 0]


def _accepted(last: int, mean: float) -> list[int]:
    """At most four accepted lengths with this mean, ending in `last`."""
    for count in range(1, 5):
        rest = round(mean * count) - last
        if abs(mean * count - round(mean * count)) < 1e-4 and (rest == 0 if count == 1 else rest >= 0):
            return [*[rest, 0, 0][: count - 1], last]
    return []


def grow(step: int, mask: int, drafting: Drafting, dice: random.Random) -> DraftTree:
    """The tree before `step` after the earlier decisions of `mask`."""
    tree, paths, drafters = DraftTree(), Paths(0, [], NGramDrafter.longest), _RandomDrafters(dice)
    for earlier in range(1, step):
        if mask >> (earlier - 1) & 1:
            medium_step(tree, paths, plan_medium(tree, drafting), drafters, drafting)
        else:
            small_step(tree, paths, drafters, drafters, drafting)
    return tree


class _RandomDrafters:
    """A small and a medium drafter in one whose tokens and probabilities are random, in a temper drawn once."""

    def __init__(self, dice: random.Random):
        self._dice = dice
        self._matches = dice.random()  # how often the small drafter proposes anything
        self._sharp = dice.choice((0.02, 0.1, 0.3, 1.0, 3.0, 8.0))  # mean of -log p

    def propose(self, paths: Paths, path: int, count: int) -> list[tuple[int, float]]:
        return self.top(path, self._dice.randint(1, count)) if self._dice.random() < self._matches else []

    def top(self, path: int, count: int) -> list[tuple[int, float]]:
        tokens = self._dice.sample(range(4 * count), count)
        return list(zip(tokens, sorted(map(self._draw, tokens), reverse=True)))

    def log_p(self, path: int, tokens: list[int]) -> list[float | None]:
        return [self._draw(token) for token in tokens]

    def _draw(self, token: int) -> float:
        return -round(self._dice.expovariate(1 / self._sharp), 3)


def _bend(state: dict[str, Any], drafting: Drafting, dice: random.Random) -> dict[str, Any]:
    """A state near another one."""
    state, nodes = {**state}, range(1, len(state["parent"]))
    what = dice.random()
    if what < 0.3:
        factor = math.exp(dice.gauss(0, 0.5))
        state["log_p"] = [-round(-log_p * factor, 3) + 0.0 for log_p in state["log_p"]]
    elif what < 0.7 and nodes:
        state["log_p"] = list(state["log_p"])
        state["log_p"][dice.choice(nodes)] = -round(dice.expovariate(1), 3)
    elif what < 0.85:
        longest = dice.randint(0, NGramDrafter.longest)
        state["match"] = [state["match"][0], *(_match(dice, longest) for _ in nodes)]
    else:
        tree = grow(state["step"], state["mask"], drafting, dice)
        columns = {"parent": tree.parent, "log_p": tree.log_p, "new": tree.new}
        state |= columns | {"visited": [*map(int, tree.visited)], "processed": [*map(int, tree.processed)]}
        state["match"] = [state["match"][0], *(_match(dice, NGramDrafter.longest) for _ in range(len(tree) - 1))]
    state["planned"] = len(plan_medium(tree_of(state), drafting))
    return state
