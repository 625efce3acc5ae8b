"""How a round's draft tree grows (spec section 2), stated on drafters that look their answers up in tables."""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from treegraft.runtime.drafting import Drafting, medium_step, plan_medium, small_step
from treegraft.runtime.tree import DraftTree, Paths

Words = tuple[int, ...]  # the tokens of a path below the root
ROOT = 0


def words(paths: Paths, path: int) -> Words:
    found: Words = ()
    while path:
        found = (paths.tokens[path], *found)
        path = paths.parents[path]
    return found


class Small:
    """A small drafter that knows a few paths: path -> {token: p}, likeliest first."""

    def __init__(self, table: Mapping[Words, Mapping[int, float]]):
        self.table = table
        self.asked: list[Words] = []

    def propose(self, paths: Paths, path: int, count: int) -> list[tuple[int, float]]:
        self.asked.append(words(paths, path))
        return [(token, math.log(p)) for token, p in self.table.get(self.asked[-1], {}).items()][:count]


class Medium:
    """A medium drafter over whole distributions, path -> {token: p}; it answers for paths it has processed only."""

    def __init__(self, distribution: Callable[[Words], Mapping[int, float]]):
        self.distribution = distribution
        self.held: dict[int, Mapping[int, float]] = {}

    def process(self, paths: Paths, nodes: list[int]) -> None:
        for path in nodes:
            assert path == 0 or paths.parents[path] in self.held, "an ancestor is not processed"
            assert path not in self.held, "processed twice"
            self.held[path] = self.distribution(words(paths, path))

    def top(self, path: int, count: int) -> list[tuple[int, float]]:
        likeliest = sorted(self.held[path].items(), key=lambda item: (-item[1], item[0]))
        return [(token, math.log(p)) for token, p in likeliest[:count]]

    def log_p(self, path: int, tokens: list[int]) -> list[float | None]:
        known = self.held[path]
        return [math.log(known[token]) if token in known else None for token in tokens]


@dataclass
class Growing:
    """A round: its tree, its drafters and the number of nodes that each medium call processed."""

    small: Small
    medium: Medium
    drafting: Drafting
    tree: DraftTree = field(default_factory=DraftTree)
    paths: Paths = field(default_factory=lambda: Paths(ROOT, [], 4))
    calls: list[int] = field(default_factory=list)

    def small_step(self) -> None:
        small_step(self.tree, self.paths, self.small, self.medium, self.drafting)

    def medium_step(self) -> list[Words]:
        planned = plan_medium(self.tree, self.drafting)
        if planned:
            self.medium.process(self.paths, [self.tree.path[node] for node in planned])
            self.calls.append(len(planned))
        return self.named(medium_step(self.tree, self.paths, planned, self.medium, self.drafting))

    def named(self, nodes: list[int]) -> list[Words]:
        return [words(self.paths, self.tree.path[node]) for node in nodes]

    def node(self, *path: int) -> int:
        return self.named(list(range(len(self.tree)))).index(path)

    def p(self, *path: int) -> float:
        return round(math.exp(self.tree.log_p[self.node(*path)]), 9)

    def s(self, *path: int) -> float:
        return round(math.exp(self.tree.log_s[self.node(*path)]), 9)


def grow(small: dict[Words, dict[int, float]], medium: dict[Words, dict[int, float]], **drafting: int) -> Growing:
    """A round with tables for both drafters; the medium drafter says {9: 1.0} after paths not in its table."""
    return Growing(Small(small), Medium(lambda path: medium.get(path, {9: 1.0})), Drafting(**drafting))


# Candidate pools and frontiers


def test_a_small_step_expands_the_best_of_the_nodes_that_the_last_step_attached() -> None:
    table = {
        (): {1: 0.5, 2: 0.3, 3: 0.2},
        (1,): {4: 0.1},
        (2,): {5: 0.9},
        (3,): {6: 0.9},
        (1, 4): {7: 0.5},
        (2, 5): {8: 0.5},
    }
    round = grow(table, {}, width=2, children=3)
    assert round.tree.new == [0]
    round.small_step()
    assert round.named(round.tree.new) == [(1,), (2,), (3,)]
    round.small_step()
    assert round.small.asked == [(), (1,), (2,)]  # (3,) is beyond W
    assert round.named(round.tree.new) == [(1, 4), (2, 5)]
    round.small_step()
    # (3,) has a better s than (1, 4), but the last step did not attach it.
    assert round.s(3) > round.s(1, 4)
    assert round.small.asked[3:] == [(2, 5), (1, 4)]


def test_a_frontier_node_gets_at_most_m_children() -> None:
    round = grow({(): {1: 0.4, 2: 0.3, 3: 0.2}}, {(): {1: 0.4, 2: 0.3, 3: 0.2}}, width=2, children=2)
    round.small_step()
    assert round.named(round.tree.new) == [(1,), (2,)]
    round = grow({}, {(): {1: 0.4, 2: 0.3, 3: 0.2}}, width=2, children=2)
    round.medium_step()
    assert round.named(round.tree.new) == [(1,), (2,)]


def test_a_medium_step_reselects_among_all_nodes_that_never_entered_the_pool() -> None:
    small = {(): {1: 0.5, 2: 0.4}, (1,): {3: 0.1}, (1, 3): {4: 0.1}}
    medium = {(): {1: 0.3, 2: 0.7}, (1,): {3: 0.1, 5: 0.9}}
    round = grow(small, medium, width=2, children=2)
    for _ in range(3):
        round.small_step()
    assert round.medium_step() == [(), (2,)]  # the best of the whole tree, not the nodes of the last step
    assert all(round.tree.visited[:5])
    assert round.named(round.tree.new) == [(1,), (2, 9)]
    # Now only the node grafted since is in the pool, although (1,) and others were never expanded.
    assert round.named(round.tree.pool()) == [(2, 9)]
    assert round.medium_step() == [(2, 9)]


def test_a_small_step_leaves_the_pool_of_visited_nodes_as_it_is() -> None:
    round = grow({(): {1: 0.5}, (1,): {2: 0.5}}, {}, width=2, children=2)
    round.small_step()
    round.small_step()
    assert not any(round.tree.visited)
    round.medium_step()
    visited = round.tree.visited.copy()
    round.small_step()
    assert round.tree.visited[: len(visited)] == visited
    assert not any(round.tree.visited[len(visited) :])


def test_nodes_are_ordered_by_s_then_depth_then_creation() -> None:
    round = grow({(): {1: 0.5, 2: 0.5, 3: 0.25}, (1,): {4: 1.0, 5: 0.5}}, {}, width=1, children=3)
    round.small_step()
    round.small_step()
    assert round.named(round.tree.ordered(10)) == [(1,), (2,), (1, 4), (3,), (1, 5)]
    assert round.named(round.tree.ordered(2)) == [(1,), (2,)]


# Probabilities


def test_all_children_of_a_processed_parent_carry_the_medium_drafters_p() -> None:
    small = {(): {1: 0.9, 2: 0.8}, (1,): {3: 0.5}, (2,): {4: 0.5}, (1, 3): {5: 0.5}}
    medium = {(): {1: 0.25, 2: 0.5, 7: 0.25}, (1,): {3: 0.125, 9: 0.5}, (2,): {4: 0.75}, (1, 3): {5: 0.5, 6: 0.5}}
    round = grow(small, medium, width=1, children=2)
    round.drafting = Drafting(width=2, children=2)
    round.small_step()
    round.small_step()
    assert (round.s(1, 3), round.s(2, 4)) == (0.45, 0.4)
    assert round.medium_step() == [(), (2,)]
    assert (round.p(1), round.p(2)) == (0.25, 0.5)
    assert (round.p(1, 3), round.p(2, 4)) == (0.125, 0.75)
    assert (round.s(1, 3), round.s(2, 4)) == (0.03125, 0.375)  # s is recomputed below them


def test_scores_are_recomputed_below_a_rescored_node() -> None:
    small = {(): {1: 0.9}, (1,): {2: 0.8}, (1, 2): {3: 0.5}}
    round = grow(small, {(): {1: 0.5, 8: 0.25}}, width=1, children=2, pool=1)
    for _ in range(3):
        round.small_step()
    round.medium_step()  # C = 1: the root alone is processed
    assert (round.s(1), round.s(1, 2), round.s(1, 2, 3)) == (0.5, 0.4, 0.2)


def test_a_small_step_never_overwrites_a_medium_p() -> None:
    small = {(): {1: 0.9}, (1,): {2: 0.9, 3: 0.8}}
    medium = {(): {1: 0.5, 4: 0.5}, (1,): {2: 0.25, 3: 0.25, 5: 0.5}}
    round = grow(small, medium, width=2, children=2)
    round.small_step()
    round.medium_step()
    assert round.named(round.tree.new) == [(4,), (1, 5), (1, 2)]
    round.tree.new = [round.node(1)]
    round.small_step()
    assert round.p(1, 2) == 0.25  # it was there with the medium drafter's p, and stays so
    assert round.p(1, 3) == 0.25  # it is new, but its parent is processed
    assert round.tree.proposers[round.node(1, 3)] == "small"


def test_where_two_small_proposals_meet_the_larger_p_stays() -> None:
    round = grow({(): {1: 0.5, 2: 0.4}, (1,): {3: 0.5}}, {}, width=2, children=2)
    round.small_step()
    round.small_step()
    for p, kept in ((0.25, 0.5), (0.75, 0.75), (0.5, 0.75)):
        round.tree.new, round.small = [0], Small({(): {1: p}})
        round.small_step()
        assert round.p(1) == kept
        assert round.s(1, 3) == kept / 2
    assert len(round.tree) == 4


def test_a_token_outside_a_reduced_draft_vocabulary_keeps_the_small_drafters_p() -> None:
    small = {(): {1: 0.75, 2: 0.5}, (1,): {4: 0.5}, (2,): {5: 0.5}}
    medium = {(): {1: 0.5, 3: 0.5}, (1,): {3: 1.0}}  # knows neither 2 nor 4
    round = grow(small, medium, width=2, children=1)
    round.drafting = Drafting(width=2, children=2)
    round.small_step()
    round.medium_step()
    assert (round.p(1), round.p(2)) == (0.5, 0.5)
    round.tree.new = [round.node(1)]
    round.small_step()
    assert round.p(1, 4) == 0.5


def test_p_is_clamped_at_one_whoever_gives_it() -> None:
    class Careless(Medium):
        def top(self, path: int, count: int) -> list[tuple[int, float]]:
            return [(token, 1e-7) for token, _ in super().top(path, count)]

        def log_p(self, path: int, tokens: list[int]) -> list[float | None]:
            return [1e-7 for _ in tokens]

    round = Growing(
        Small({(): {1: 1.5}, (1,): {2: 1.5}}), Careless(lambda path: {9: 1.0}), Drafting(width=4, children=2)
    )
    round.small_step()
    round.medium_step()
    round.small_step()
    round.medium_step()
    assert len(round.tree) > 4
    assert max(round.tree.log_p) == max(round.tree.log_s) == 0.0


# Grafting


def test_a_proposed_token_that_is_already_a_child_keeps_its_subtree_and_can_be_expanded_again() -> None:
    small = {(): {1: 0.9}, (1,): {2: 0.9}, (1, 2): {3: 0.9}}
    medium = {(): {1: 0.1, 7: 0.9}, (1,): {2: 1.0}}
    round = grow(small, medium, width=2, children=2)
    for _ in range(3):
        round.small_step()
    below = round.node(1, 2, 3)
    frontier = round.medium_step()
    assert frontier == [(), (1,)]
    # (1,) was expanded in this step, so it is not new; (1, 2) exists and is new again.
    assert round.named(round.tree.new) == [(7,), (1, 2)]
    assert round.node(1, 2, 3) == below
    assert len(round.tree) == len(set(round.named(list(range(len(round.tree))))))
    round.small_step()
    assert round.small.asked[-2:] == [(7,), (1, 2)]


def test_a_small_step_without_a_match_adds_nothing_and_the_round_goes_on() -> None:
    round = grow({(): {1: 0.9}}, {(): {1: 0.5, 2: 0.5}}, width=2, children=2)
    round.small_step()
    round.small_step()
    assert round.tree.new == [] and len(round.tree) == 2
    round.small_step()
    assert len(round.tree) == 2
    assert round.medium_step() == [(), (1,)]
    assert round.named(round.tree.new) == [(2,), (1, 9)]


def test_forks_of_a_tree_grow_apart() -> None:
    round = grow({(): {1: 0.5, 2: 0.5}}, {(): {3: 0.5, 1: 0.25}}, width=2, children=2)
    round.small_step()
    before = round.tree.fork()
    other = round.tree.fork()
    round.medium_step()
    assert other == before and other != round.tree
    round.tree, mine = other, round.tree
    round.small_step()
    assert mine.visited[0] and not round.tree.visited[0]


def test_a_path_has_one_id_and_remembers_the_text_before_it() -> None:
    paths = Paths(7, [1, 2, 3, 4], tail_length=3)
    a = paths.child(0, 5)
    assert paths.child(0, 5) == a != paths.child(0, 6)
    assert paths.tails[0] == (3, 4, 7) and paths.tails[a] == (4, 7, 5)
    assert paths.depths[paths.child(a, 5)] == 2
    assert Paths(7, [], 3).tails == [(7,)]


# What a medium step forwards


def test_all_medium_forwards_the_root_and_then_w_nodes_a_step() -> None:
    for width, children in ((3, 3), (2, 5), (4, 4)):
        rng = Rng(width)
        round = Growing(Small({}), Medium(rng.distribution), Drafting(width=width, children=children))
        for _ in range(5):
            round.medium_step()
        assert round.calls == [1, width, width, width, width]


def test_a_medium_step_with_nothing_to_process_makes_no_call() -> None:
    round = grow({(): {1: 1.0}}, {(): {1: 1.0}}, width=1, children=1)
    round.small_step()
    assert round.medium_step() == [()]
    assert round.calls == [1]
    assert round.tree.pool() == []
    before = round.tree.log_s.copy()
    assert plan_medium(round.tree, round.drafting) == []
    assert round.medium_step() == []
    assert round.calls == [1] and round.tree.log_s == before and round.tree.new == []


def test_leaves_that_w_certain_nodes_precede_are_not_forwarded() -> None:
    medium = {(): {1: 0.5, 2: 0.3, 3: 0.15, 4: 0.05}}
    round = grow({}, medium, width=2, children=4)
    round.medium_step()
    assert round.named(plan_medium(round.tree, round.drafting)) == [(1,), (2,)]


def test_a_leafs_small_score_does_not_decide_whether_it_is_forwarded() -> None:
    # The small drafter thinks nothing of (1, 5); the medium drafter likes it best.
    small = {(1,): {5: 0.001}}
    medium = {(): {1: 0.6, 2: 0.2, 3: 0.2}, (1,): {5: 0.9, 6: 0.1}}
    round = grow(small, medium, width=2, children=3)
    round.medium_step()
    round.small_step()
    assert (1, 5) in round.named(plan_medium(round.tree, round.drafting))
    assert round.medium_step() == [(1,), (1, 5)]
    assert round.s(1, 5) == 0.54


class Rng:
    """Random but fixed answers for every path; `coarse` ones make many equal scores."""

    def __init__(self, seed: int, size: int = 7, coarse: bool = False):
        self.seed, self.size, self.coarse = seed, size, coarse

    def distribution(self, path: Words, who: str = "medium") -> dict[int, float]:
        rng = random.Random(f"{self.seed} {who} {path}")
        if self.coarse:
            return {token: rng.choice((1.0, 0.5, 0.5, 0.25)) for token in range(self.size)}
        weights = [rng.expovariate(1.0) ** 3 for _ in range(self.size)]
        return {token: weight / sum(weights) for token, weight in enumerate(weights)}

    def small(self, path: Words) -> dict[int, float]:
        rng = random.Random(f"{self.seed} {path}")
        found = list(self.distribution(path, "small").items())
        return dict(rng.sample(found, rng.choice((0, 1, 2, 3))))


class Sparse(Small):
    """A small drafter that knows something after most paths."""

    def __init__(self, rng: Rng):
        super().__init__({})
        self.rng = rng

    def propose(self, paths: Paths, path: int, count: int) -> list[tuple[int, float]]:
        return [(token, math.log(p)) for token, p in self.rng.small(words(paths, path)).items()][:count]


def random_round(seed: int, pool: int | None = None) -> tuple[Growing, list[bool]]:
    """A round on random drafters, every other one with a reduced draft vocabulary, and a random schedule for it."""
    draw = random.Random(seed)
    rng = Rng(seed, coarse=seed % 3 == 0)
    drafting = Drafting(width=draw.randint(1, 4), children=draw.randint(1, 4), pool=pool)

    def known(path: Words) -> dict[int, float]:
        whole = rng.distribution(path)
        return {token: p for token, p in whole.items() if token != 2} if seed % 2 else whole

    return Growing(Sparse(rng), Medium(known), drafting), [draw.random() < 0.5 for _ in range(7)]


def whole_pool(tree: DraftTree) -> list[int]:
    """Everything a medium step could process: the pool and its ancestors."""
    needed = set()
    for node in tree.pool():
        while node >= 0 and not tree.processed[node]:
            needed.add(node)
            node = tree.parent[node]
    return sorted(needed)


@pytest.mark.parametrize("start", range(0, 600, 100))
def test_processing_the_planned_nodes_is_as_good_as_processing_the_whole_pool(start: int) -> None:
    spared = 0
    for seed in range(start, start + 100):
        round, schedule = random_round(seed)
        for invoke in schedule:
            if not invoke:
                round.small_step()
                continue
            twin, everything = round.tree.fork(), Medium(round.medium.distribution)
            everything.held = dict(round.medium.held)
            nodes = whole_pool(twin)
            everything.process(round.paths, [twin.path[node] for node in nodes])
            expected = round.named(medium_step(twin, round.paths, nodes, everything, round.drafting))
            spared += len(nodes) - len(plan_medium(round.tree, round.drafting))
            assert round.medium_step() == expected
            assert (round.tree.token, round.tree.parent, round.tree.new) == (twin.token, twin.parent, twin.new)
            assert (round.tree.log_p, round.tree.log_s) == (twin.log_p, twin.log_s)
    assert spared > 200


@pytest.mark.parametrize("pool", [None, 1, 2, 5])
def test_what_holds_after_every_step_of_any_round(pool: int | None) -> None:
    for seed in range(200):
        round, schedule = random_round(seed, pool)
        tree = round.tree
        for invoke in schedule:
            before, visited = round.named(list(range(len(tree)))), tree.visited.copy()
            if invoke:
                round.medium_step()
            else:
                round.small_step()
                assert tree.visited[: len(visited)] == visited
            assert round.named(list(range(len(before)))) == before  # grafted without removing anything
            assert all(now or not then for then, now in zip(visited, tree.visited))
            children = [node for node in range(len(tree)) if node]
            for node in children:
                parent = tree.parent[node]
                assert parent < node and node in tree.children[parent]
                assert tree.log_p[node] <= 0 and tree.log_s[node] <= tree.log_s[parent]
                assert tree.log_s[node] == tree.log_s[parent] + tree.log_p[node]
                assert tree.processed[parent] or not tree.processed[node]
                if tree.processed[parent]:
                    known = round.medium.log_p(tree.path[parent], [tree.token[node]])[0]
                    assert known is None or tree.log_p[node] == known
            assert {tree.path[node] for node in range(len(tree)) if tree.processed[node]} == set(round.medium.held)
            for budget in range(len(tree)):
                kept = tree.ordered(budget)
                assert len(kept) == budget and 0 not in kept
                assert {tree.parent[node] for node in kept} <= {0, *kept}


# The limit C on nodes a call


def test_a_call_processes_the_best_c_of_what_it_would_process_without_the_limit() -> None:
    limited = 0
    for seed in range(200):
        round, schedule = random_round(seed, pool=3)
        for invoke in schedule:
            if not invoke:
                round.small_step()
                continue
            free = plan_medium(round.tree, Drafting(**{**round.drafting.as_dict(), "pool": None}))
            planned = plan_medium(round.tree, round.drafting)
            assert planned == sorted(round.tree.top(free, 3))
            limited += len(planned) < len(free)
            for node in planned:  # closed under ancestors, and they come first
                parent = round.tree.parent[node]
                assert parent < 0 or round.tree.processed[parent] or parent in planned[: planned.index(node)]
            round.medium_step()
    assert limited > 50


def test_with_a_limit_the_frontier_has_logits_and_the_rest_waits() -> None:
    small = {(): {1: 0.9, 2: 0.8}, (1,): {3: 0.7}, (2,): {4: 0.6}, (1, 3): {5: 0.9}}
    medium = {(): {1: 0.1, 2: 0.9}, (1,): {3: 1.0}, (2,): {4: 1.0}}
    round = grow(small, medium, width=2, children=2, pool=2)
    for _ in range(3):
        round.small_step()
    assert round.named(plan_medium(round.tree, round.drafting)) == [(), (1,)]  # the best two by the scores known before
    # (2,) now has the better score, but no logits to expand it with.
    assert round.medium_step() == [(), (1,)]
    assert round.s(2) == 0.9
    # Under (), (1,) everything entered P; (2, 4) and (1, 3, 5) have parents without logits and wait.
    assert round.named(round.tree.pool()) == [(2, 4), (1, 3, 5)]
    # (2,) is in P, but it must be processed before what is below it.
    assert round.named(plan_medium(round.tree, round.drafting)) == [(2,), (2, 4)]
    assert round.medium_step() == [(2, 4)]
    assert round.named(round.tree.pool()) == [(1, 3, 5), (2, 4, 9)]


# Options


@pytest.mark.parametrize(
    "wrong",
    [{"depth": -1}, {"depth": 17}, {"width": 0}, {"children": 0}, {"budget": 0}, {"pool": 0}, {"medium_calls": -1}],
    ids=str,
)
def test_a_setting_out_of_range_is_named(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"--{next(iter(wrong)).replace('_', '-')} is "):
        Drafting(**wrong)


def test_a_limit_on_medium_calls_counts_the_steps_taken() -> None:
    assert Drafting().may_call(0b1111)
    assert Drafting(medium_calls=2).may_call(0b100)
    assert not Drafting(medium_calls=2).may_call(0b101)
    assert not Drafting(medium_calls=0).may_call(0)
