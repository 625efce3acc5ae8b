"""A student that is a handful of threshold rules, readable as sentences (spec section 7)."""

from collections.abc import Sequence

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.tree import DecisionTreeClassifier

from treegraft.distill.examples import Examples, midpoint
from treegraft.runtime.scheduler import Rule, Rules

CONDITIONS = 16  # in all rules together
LEAVES = 6  # of the trees that rules of one step are read off
SHARE = 0.02  # of a step's weight: no rule rests on less

Conditions = tuple[tuple[str, str, float], ...]


class RulesStudent(BaseEstimator):
    """Fits Rules, `rules_`, with at most `conditions` conditions in all."""

    def __init__(self, conditions: int = CONDITIONS):
        self.conditions = conditions

    def fit(self, examples: Examples) -> "RulesStudent":
        # best[c] is the greatest gain with c conditions over the steps so far, and its rules.
        best: list[tuple[float, tuple[Rule, ...]]] = [(0.0, ())] * (self.conditions + 1)
        for step in np.unique(examples.step).astype(int).tolist():
            options = _options(examples, step)
            best = [
                max(
                    (
                        (best[c - cost][0] + gain, best[c - cost][1] + tuple(Rule(step, each) for each in found))
                        for cost, gain, found in options
                        if cost <= c
                    ),
                    key=lambda option: option[0],
                )
                for c in range(self.conditions + 1)
            ]
        rules = best[-1][1]
        used = {name for rule in rules for name, _, _ in rule.conditions}
        self.rules_ = Rules(rules, tuple(name for name in examples.names if name in used))
        return self


def _options(examples: Examples, step: int) -> list[tuple[int, float, list[Conditions]]]:
    """What one step may do, fewest conditions first: (conditions, gain in tokens, rules)."""
    mine = examples.step == step
    x, gain = examples.x[mine], (examples.weight * examples.margin)[mine]
    names = [name for name in examples.names if name != "step"]
    x = x[:, [examples.names.index(name) for name in names]]
    # Never and always.
    options: list[tuple[int, float, list[Conditions]]] = [(0, 0.0, []), (0, float(gain.sum()), [()])]
    if not names or not gain.any():
        return options
    for leaves in range(2, LEAVES + 1):
        inner = DecisionTreeClassifier(max_leaf_nodes=leaves, min_weight_fraction_leaf=SHARE, random_state=0)
        inner.fit(x, gain > 0, sample_weight=examples.pull[mine])
        total = np.bincount(inner.apply(x), gain, minlength=inner.tree_.node_count)
        found = [_conditions(inner.tree_, int(leaf), names, x) for leaf in np.flatnonzero(total > 0)]
        options.append((sum(map(len, found)), float(total[total > 0].sum()), found))
    return options


def _conditions(tree, leaf: int, names: list[str], x: np.ndarray) -> Conditions:  # type: ignore[no-untyped-def]
    """The path to a leaf as conditions, one a signal and direction."""
    bounds: dict[tuple[str, str], float] = {}
    node = leaf
    while node:
        parent = int(np.flatnonzero((tree.children_left == node) | (tree.children_right == node))[0])
        name, low = names[tree.feature[parent]], tree.children_left[parent] == node
        threshold = midpoint(np.unique(x[:, tree.feature[parent]]), float(tree.threshold[parent]))
        # Going up, the first bound of a signal and direction is the tightest.
        bounds.setdefault((name, "<=" if low else ">"), threshold)
        node = parent
    return tuple((name, operator, threshold) for (name, operator), threshold in reversed(bounds.items()))


def sentences(rules: Rules) -> Sequence[str]:
    """The rules in words."""
    made = []
    for rule in rules.rules:
        conditions = " and ".join(
            f"{name} is {'at most' if operator == '<=' else 'above'} {threshold:.4g}"
            for name, operator, threshold in rule.conditions
        )
        made.append(f"At step {rule.step}, call the medium drafter{' if ' + conditions if conditions else ''}.")
    return made or ["Never call the medium drafter."]
