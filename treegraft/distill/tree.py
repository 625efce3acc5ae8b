"""A student that is one small decision tree over a few signals, the step among them (spec section 7)."""

from dataclasses import dataclass

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.tree import DecisionTreeRegressor

from treegraft.distill.examples import Examples, midpoint
from treegraft.runtime.scheduler import TreeModel

LEAVES = 64
SHARE = 0.002  # of a step's weight: no leaf rests on less


class TreeStudent(BaseEstimator):
    """Fits a TreeModel, `tree_`, of at most `leaves` leaves.

    Every step grows a tree of its own; of all of them together the leaves are kept that gain most.
    """

    def __init__(self, leaves: int = LEAVES):
        self.leaves = leaves

    def fit(self, examples: Examples) -> "TreeStudent":
        steps = np.unique(examples.step).astype(int).tolist()
        if not steps:  # no call was possible anywhere
            self.tree_ = TreeModel((-1,), (0.0,), (-1,), (-1,), (0.0,), ())
            return self
        whole = _grow(examples, steps[-1], self.leaves)
        for step in reversed(steps[:-1]):
            own = _grow(examples, step, self.leaves)
            whole = _join(examples.names.index("step"), step + 0.5, own, whole, self.leaves)
        columns: dict[str, list] = {name: [] for name in ("feature", "threshold", "left", "right", "value")}

        def copy(branch: Branch, leaves: int) -> int:
            """Copy what gains most with at most `leaves` leaves, parents first; the fewest that gain as much."""
            index, gains = len(columns["feature"]), branch.gains[:leaves]
            used = int(np.argmax(gains >= gains.max() - 1e-9 * abs(gains.max())))  # leaves but one
            row = (branch.feature, branch.threshold, -1, -1) if used else (-1, 0.0, -1, -1)
            for name, value in zip(columns, (*row, branch.margin)):
                columns[name].append(value)
            if used:
                assert branch.low and branch.high
                columns["left"][index] = copy(branch.low, int(branch.to_low[used]))
                columns["right"][index] = copy(branch.high, used + 1 - int(branch.to_low[used]))
            return index

        copy(whole, self.leaves)
        read = sorted({feature for feature in columns["feature"] if feature >= 0})
        columns["feature"] = [read.index(feature) if feature >= 0 else -1 for feature in columns["feature"]]
        self.tree_ = TreeModel(
            **{name: tuple(column) for name, column in columns.items()}, reads=tuple(examples.names[i] for i in read)
        )
        return self


@dataclass
class Branch:
    """A node with all below it. With n leaves it gains at most gains[n - 1] tokens, to_low[n - 1] of them in `low`."""

    weight: float
    total: float  # weighted margin of its examples, tokens
    gains: np.ndarray
    to_low: np.ndarray
    feature: int = -1
    threshold: float = 0.0
    low: "Branch | None" = None
    high: "Branch | None" = None

    @property
    def margin(self) -> float:
        return self.total / self.weight


def _join(feature: int, threshold: float, low: Branch, high: Branch, most: int) -> Branch:
    """A node over two branches, for trees of at most `most` leaves."""
    weight, total = low.weight + high.weight, low.total + high.total
    gains = np.full(min(most, len(low.gains) + len(high.gains)), -np.inf)
    gains[0], to_low = max(0.0, total), np.zeros(len(gains), int)
    for leaves, gain in enumerate(low.gains, start=1):
        here = slice(leaves, min(most, leaves + len(high.gains)))
        found = gain + high.gains[: here.stop - leaves]
        better = found > gains[here]
        gains[here][better], to_low[here][better] = found[better], leaves
    return Branch(weight, total, gains, to_low, feature, threshold, low, high)


def _grow(examples: Examples, step: int, leaves: int) -> Branch:
    """The tree of one step, as large as it may get."""
    mine = examples.step == step
    x, margin, weight = examples.x[mine], examples.margin[mine], examples.weight[mine]
    inner = DecisionTreeRegressor(max_leaf_nodes=leaves, min_weight_fraction_leaf=SHARE, random_state=0)
    tree = inner.fit(x, np.clip(margin, -examples.cap, examples.cap), sample_weight=weight).tree_
    at = inner.apply(x)
    weights, totals = (np.bincount(at, part, minlength=tree.node_count) for part in (weight, weight * margin))
    observed = {i: np.unique(x[:, i]) for i in set(tree.feature.tolist()) if i >= 0}

    def branch(node: int) -> Branch:
        feature = int(tree.feature[node])
        if feature < 0:
            return Branch(
                float(weights[node]), float(totals[node]), np.maximum(totals[node : node + 1], 0), np.zeros(1, int)
            )
        low, high = branch(int(tree.children_left[node])), branch(int(tree.children_right[node]))
        return _join(feature, midpoint(observed[feature], float(tree.threshold[node])), low, high, leaves)

    return branch(0)
