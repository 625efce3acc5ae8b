"""A student that is one small decision tree over a few signals, the step among them (spec section 7)."""

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.tree import DecisionTreeClassifier

from treegraft.distill.examples import Examples, midpoint
from treegraft.runtime.scheduler import TreeModel

LEAVES = 64
SHARE = 0.004  # of the total weight: no leaf rests on less


class TreeStudent(BaseEstimator):
    """Fits a TreeModel, `tree_`, of at most `leaves` leaves."""

    def __init__(self, leaves: int = LEAVES):
        self.leaves = leaves

    def fit(self, examples: Examples) -> "TreeStudent":
        x, gain = examples.x, examples.weight * examples.margin
        # Classes by sign with weight |margin| make the split that loses least, and each leaf's sign its best decision.
        inner = DecisionTreeClassifier(max_leaf_nodes=self.leaves, min_weight_fraction_leaf=SHARE, random_state=0).fit(
            x, gain > 0, sample_weight=examples.pull
        )
        tree = inner.tree_
        inside = inner.decision_path(x).tocsc()
        reaching = [inside[:, i].indices for i in range(tree.node_count)]
        margin = np.array([gain[rows].sum() / examples.weight[rows].sum() for rows in reaching])
        columns: dict[str, list] = {name: [] for name in ("feature", "threshold", "left", "right", "value")}
        observed = {i: np.unique(x[:, i]) for i in set(tree.feature.tolist()) if i >= 0}

        def same_decision(node: int) -> bool | None:
            """The decision of all leaves below, or None if they differ."""
            if tree.children_left[node] < 0:
                return bool(margin[node] > 0)
            below = {same_decision(int(child)) for child in (tree.children_left[node], tree.children_right[node])}
            return below.pop() if len(below) == 1 else None

        def copy(node: int) -> int:
            """Copy a subtree, parents first; where it decides nothing, a leaf will do."""
            index = len(columns["feature"])
            leaf = same_decision(node) is not None
            feature = -1 if leaf else int(tree.feature[node])
            threshold = 0.0 if leaf else midpoint(observed[feature], float(tree.threshold[node]))
            for name, value in (("feature", feature), ("threshold", threshold), ("left", -1), ("right", -1)):
                columns[name].append(value)
            columns["value"].append(float(margin[node]))
            if not leaf:
                columns["left"][index] = copy(int(tree.children_left[node]))
                columns["right"][index] = copy(int(tree.children_right[node]))
            return index

        copy(0)
        read = sorted({feature for feature in columns["feature"] if feature >= 0})
        columns["feature"] = [read.index(feature) if feature >= 0 else -1 for feature in columns["feature"]]
        self.tree_ = TreeModel(
            **{name: tuple(column) for name, column in columns.items()}, reads=tuple(examples.names[i] for i in read)
        )
        return self
