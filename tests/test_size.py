"""How many drafted nodes are verified (spec section 2)."""

import math

import numpy as np
import pytest

from treegraft.runtime.drafting import Drafting
from treegraft.runtime.latency import Curve, LatencyProfile
from treegraft.runtime.size import Cut
from treegraft.runtime.tree import DraftTree


def profile(*ms: float, context_ms: float = 0.0, context_token_ms: float = 0.0) -> LatencyProfile:
    """A target that takes ms[i] for i + 1 tokens."""
    return LatencyProfile(
        Curve(tuple(range(1, len(ms) + 1)), ms, context_ms, context_token_ms), Curve((1,), (1.0,))
    )  # fmt: skip


def best_by_trying_all(log_s: list[float], context: int, rho: float, model: LatencyProfile) -> int:
    """The smallest n with the most (sum of the n best s) - rho * T_tgt(n + 1)."""
    s = [math.exp(float(np.float32(value))) for value in log_s]
    worths = [sum(s[:n]) - rho * float(model.target(n + 1, context)) for n in range(len(s) + 1)]
    return worths.index(max(worths))


def test_worth_is_the_best_of_all_sizes() -> None:
    rng = np.random.default_rng(0)
    chosen = []
    for _ in range(300):
        count = int(rng.integers(1, 20))
        log_s = sorted((-rng.exponential(2.0, count)).tolist(), reverse=True)
        model = profile(
            *np.cumsum(rng.exponential(1.0, 21)).tolist(),
            context_ms=rng.random() / 10,
            context_token_ms=rng.random() / 1e3,
        )
        rho, context = rng.random() / 2, int(rng.integers(0, 500))
        expected = best_by_trying_all(log_s, context, rho, model)
        assert Cut("worth", rho, model).size(log_s, context) == expected
        chosen.append(expected)
    assert min(chosen) == 0 and len(set(chosen)) > 8


def test_many_trees_at_once_are_cut_as_each_alone() -> None:
    rng = np.random.default_rng(1)
    rows = np.full((50, 12), -np.inf, dtype=np.float32)
    for row in rows:
        count = rng.integers(0, 13)
        row[:count] = np.sort(-rng.exponential(2.0, count))[::-1]
    context = rng.integers(0, 100, 50)
    model = profile(1.0, 1.1, 1.3, 2.0, 2.1, 3.0, context_token_ms=0.001)
    for cut in (Cut("worth", 0.5, model), Cut("score", log_s=-1.5), Cut("none")):
        alone = [cut.size(row[row > -np.inf].tolist(), int(at)) for row, at in zip(rows, context)]
        assert cut.sizes(rows, context).tolist() == alone


def test_nothing_is_verified_where_no_node_is_worth_its_time() -> None:
    assert Cut("worth", 1.0, profile(1.0, 3.0, 5.0)).size([-0.01, -0.02], 0) == 0


def test_ties_go_to_the_smallest_size() -> None:
    model = profile(1.0, 2.0, 3.0, 4.0)
    assert Cut("worth", 1.0, model).size([0.0, 0.0, 0.0], 0) == 0  # each node earns exactly what it costs
    assert Cut("worth", 0.0, model).size([-1.0, -800.0, -900.0], 0) == 1  # the others' s is 0 in float64


def test_a_step_in_the_latency_is_crossed_where_enough_nodes_wait_beyond_it() -> None:
    model = profile(1.0, 1.0, 2.0, 2.0, 2.0, 2.0)
    cut = Cut("worth", 1.0, model)
    assert cut.size([-0.5, -1.0, -2.0], 0) == 1
    assert cut.size([-0.5, -0.6, -0.7, -0.8], 0) == 4


def test_a_longer_context_makes_nodes_dearer() -> None:
    cut = Cut("worth", 1.0, profile(1.0, 1.1, 1.2, context_token_ms=0.001))
    assert [cut.size([-0.7, -1.5], context) for context in (0, 300, 1000)] == [2, 1, 0]


def test_a_score_limit_keeps_the_nodes_that_reach_it() -> None:
    cut = Cut("score", log_s=-2.5)
    assert cut.size([-0.1, -2.5, -2.6], 10) == 2
    assert cut.size([-3.0], 10) == 0


def test_no_cut_keeps_the_whole_budget() -> None:
    assert Cut("none").size([-0.1, -50.0], 10) == 2


@pytest.mark.parametrize("cut", [Cut("worth", 0.0, profile(1.0)), Cut("score", log_s=-9.0), Cut("none")], ids=str)
def test_an_empty_tree_is_a_plain_step(cut: Cut) -> None:
    assert cut.size([], 10) == 0


def test_the_budget_caps_what_is_offered_to_the_cut() -> None:
    tree = DraftTree()
    for token in range(30):
        tree.add(0, token, -0.1 * token, 0, "small")
    offered = [tree.log_s[node] for node in tree.ordered(Drafting(budget=7).budget)]
    for cut in (Cut("worth", 0.0, profile(1.0)), Cut("score", log_s=-9.0), Cut("none")):
        assert cut.size(offered, 0) == 7
