"""Refine a student directly on replayed tokens per second, one threshold or leaf at a time (spec section 7).

Imitation weighs each decision alone. A replay also knows what a decision does to the rounds that follow, so moves that
imitation cannot see are tried here; one is kept only where it gains more than its standard error over prompts.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from treegraft.distill.examples import midpoint
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.latency import LatencyProfile
from treegraft.runtime.scheduler import Rule, Rules, TreeModel
from treegraft.runtime.size import Cut
from treegraft.value_system.gains import prompt_groups
from treegraft.value_system.replay import NAMES, Positions, flatten, leaf_of, race

ANSWERS = 240  # replays of at most this many answers judge a move
PASSES = 2  # over all conditions of a set of rules
QUANTILES = 9  # thresholds tried for a condition, besides doing without it and doing without its rule
FLIPS = 8  # leaves of a tree that change their decision, at most

Race = Callable[[int, Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]], np.ndarray]


def refine(
    student: Rules | TreeModel,
    observed: list[np.ndarray],
    log: Positions,
    cut: Cut,
    profile: LatencyProfile,
    drafting: Drafting,
) -> Rules | TreeModel:
    """The student with moves that gain on `log`; `observed[k - 1]` has the signals (n, len(NAMES)) seen at step k."""
    chosen = np.unique(np.linspace(0, len(log.answers) - 1, min(ANSWERS, len(log.answers))).astype(int))
    part = log if len(chosen) == len(log.answers) else flatten([log.answers[i] for i in chosen])
    groups = prompt_groups(part.answers)

    def times(entrants: int, decide: Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
        ms = race(part, entrants, decide, student, cut, profile, drafting)
        return np.stack([np.bincount(groups, row) for row in ms])

    return _refine_rules(student, observed, times) if isinstance(student, Rules) else _refine_tree(student, times)


def _best_move(ms: np.ndarray) -> int:
    """Which entrant (entrants, prompts) beats entrant 0 most, and by more than its standard error; 0: none."""
    saved = ms[0] - ms
    error = saved.std(axis=1) * math.sqrt(ms.shape[1])
    return int(np.where(saved.sum(axis=1) > error, saved.sum(axis=1), 0.0).argmax())


def _refine_rules(rules: Rules, observed: list[np.ndarray], times: Race) -> Rules:
    conditions = [(i, *condition) for i, rule in enumerate(rules.rules) for condition in rule.conditions]
    thresholds = np.array([threshold for *_, threshold in conditions])
    always = np.array([math.inf if operator == "<=" else -math.inf for _, _, operator, _ in conditions])

    def decide(entrants: np.ndarray) -> Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
        def made(step: int, entrant: np.ndarray, masks: np.ndarray, values: np.ndarray) -> np.ndarray:
            invoke = np.zeros(len(masks), dtype=bool)
            for i, rule in enumerate(rules.rules):
                if rule.step == step:
                    holds = np.ones(len(masks), dtype=bool)
                    for c, (of_rule, name, operator, _) in enumerate(conditions):
                        if of_rule == i:
                            low = values[:, NAMES.index(name)] <= entrants[entrant, c]
                            holds &= low if operator == "<=" else ~low
                    invoke |= holds
            return invoke

        return made

    for _ in range(PASSES):
        before = thresholds.copy()
        for c, (of_rule, name, _, _) in enumerate(conditions):
            seen = np.unique(observed[rules.rules[of_rule].step - 1][:, NAMES.index(name)])
            levels = np.quantile(seen, np.linspace(0.05, 0.95, QUANTILES))
            # Among moves that gain alike the first is taken: without the rule, then without the condition.
            tried = [thresholds[c], -always[c], always[c], *(midpoint(seen, level) for level in levels)]
            entrants = np.tile(thresholds, (len(tried), 1))
            entrants[:, c] = tried
            thresholds = entrants[_best_move(times(len(tried), decide(entrants)))]
        if np.array_equal(before, thresholds):
            break
    refined = []
    for i, rule in enumerate(rules.rules):
        kept = [(name, operator, float(thresholds[c]), always[c])
                for c, (of_rule, name, operator, _) in enumerate(conditions) if of_rule == i]  # fmt: skip
        if not any(threshold == -whole for *_, threshold, whole in kept):
            refined.append(Rule(rule.step, tuple((n, o, t) for n, o, t, whole in kept if t != whole)))
    read = {name for rule in refined for name, _, _ in rule.conditions}
    return Rules(tuple(refined), tuple(name for name in rules.reads if name in read))


def _refine_tree(tree: TreeModel, times: Race) -> TreeModel:
    leaves = np.array([node for node, feature in enumerate(tree.feature) if feature < 0])
    for _ in range(FLIPS):
        signs = np.tile(np.array(tree.value) > 0, (len(leaves) + 1, 1))
        signs[np.arange(1, len(leaves) + 1), leaves] ^= True

        def decide(
            step: int, entrant: np.ndarray, masks: np.ndarray, values: np.ndarray,
            tree: TreeModel = tree, signs: np.ndarray = signs,
        ) -> np.ndarray:  # fmt: skip
            return signs[entrant, leaf_of(tree, values)]

        ms = times(len(signs), decide)
        if not (move := _best_move(ms)):
            break
        leaf = int(leaves[move - 1])
        # A margin of the other sign: the replay says that the teacher's was wrong there.
        flipped = -tree.value[leaf] or 1e-6
        tree = replace(tree, value=(*tree.value[:leaf], flipped, *tree.value[leaf + 1 :]))
        # Only a leaf that gains alone is tried again.
        leaves = leaves[(ms[1:].sum(axis=1) < ms[0].sum()) & (leaves != leaf)]
    return tree
