"""The signals that a schedule may read before a decision, each declared once (spec section 4).

This list drives the log's columns, the fit, the artifact and the runtime. Nothing here needs torch or a model.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

LOG_S_FLOOR = -20.0  # the score of an empty set, and the least that a node counts for


class Tree(Protocol):
    """What signals read of a draft tree: columns over nodes in order of creation, node 0 the root."""

    @property
    def depth(self) -> Sequence[int]: ...
    @property
    def log_s(self) -> Sequence[float]: ...
    @property
    def visited(self) -> Sequence[bool]: ...
    @property
    def children(self) -> Sequence[Sequence[int]]: ...
    @property
    def new(self) -> Sequence[int]: ...


class PlainTree:
    """The draft tree of any decoder as signals read it, from plain columns over its nodes (lists or NumPy arrays).

    Node 0 is the root and a parent stands before its children. parent[i] is a node's parent (the root's: -1), log_p[i]
    the log-probability of its token after its parent's prefix (the root's: 0), visited[i] whether it entered the medium
    drafter's candidate pool; `new` are the nodes that the previous step attached, N_k (at step 1: the root).
    Raises ValueError naming the column and node at fault.
    """

    def __init__(
        self, parent: Sequence[int], log_p: Sequence[float], visited: Sequence[bool], new: Sequence[int]
    ) -> None:
        if not len(parent) == len(log_p) == len(visited) > 0:
            raise ValueError(f"parent, log_p and visited have {len(parent)}, {len(log_p)} and {len(visited)} nodes")
        self.depth, self.log_s, self.children = [0], [0.0], [list[int]()]
        self.visited = [bool(entered) for entered in visited]
        self.new = [int(node) for node in new]
        for node in range(1, len(parent)):
            above, log = int(parent[node]), float(log_p[node])
            if not 0 <= above < node:
                raise ValueError(f"parent[{node}] is {above}; a parent stands before its children")
            if not log <= 0:
                raise ValueError(f"log_p[{node}] is {log}; a log-probability is at most 0")
            self.depth.append(self.depth[above] + 1)
            self.log_s.append(self.log_s[above] + log)
            self.children.append([])
            self.children[above].append(node)
        for node in self.new:
            if not 0 <= node < len(parent):
                raise ValueError(f"new holds node {node}; the tree has {len(parent)}")

    def rank(self, node: int) -> tuple[float, int, int]:
        """The sort key of the total order (-s, depth, creation)."""
        return (-self.log_s[node], self.depth[node], node)


@dataclass
class State:
    """A round just before step `step` (1..K). Sets that several signals share are worked out at most once.

    match(node) gives the n-gram match length at a node and the tokens since its latest occurrence; planned() gives the
    number of nodes that a medium step would process. Neither calls the medium drafter, and either is asked only where a
    signal needs it. What a decoder does not know is NaN, and an artifact that reads it takes its fallback.
    """

    tree: Tree
    width: int
    step: int
    mask: int
    prompt_length: int
    answer_position: int
    target_entropy: float
    target_margin: float
    match: Callable[[int], tuple[int, int]]
    planned: Callable[[], int]
    lag: int = 0
    accepted: Sequence[int] = ()  # accepted lengths of the earlier rounds, latest last

    def _top(self, nodes: Sequence[int]) -> list[int]:
        """Top_W(nodes), in no order: all that signals ask of it is order-free."""
        log_s, depth, width = self.tree.log_s, self.tree.depth, self.width
        if len(nodes) <= width:
            return list(nodes)
        least = sorted([log_s[node] for node in nodes])[-width]
        found = [node for node in nodes if log_s[node] >= least]
        if len(found) > width:  # a tie at the border goes by depth, then creation
            found.sort(key=lambda node: (-log_s[node], depth[node], node))
        return found[:width]

    @cached_property
    def frontier(self) -> list[int]:
        """Top_W(N_k), which a small step would expand."""
        return self._top(self.tree.new)

    @cached_property
    def pool(self) -> list[int]:
        """V \\ P, the candidates of a medium step."""
        visited = self.tree.visited
        return [node for node in range(len(visited)) if not visited[node]]

    @cached_property
    def reselected(self) -> list[int]:
        """Top_W(V \\ P) by present scores, which a medium step would start from."""
        return self._top(self.pool)

    @cached_property
    def frontier_scores(self) -> list[float]:
        return self._scores(self.frontier)

    @cached_property
    def frontier_score(self) -> float:
        return _mean(self.frontier_scores, LOG_S_FLOOR)

    @cached_property
    def reselected_score(self) -> float:
        return _mean(self._scores(self.reselected), LOG_S_FLOOR)

    @cached_property
    def frontier_depth(self) -> float:
        return self._depth(self.frontier)

    @cached_property
    def reselected_depth(self) -> float:
        return self._depth(self.reselected)

    @cached_property
    def found(self) -> list[tuple[int, int]]:
        """The n-gram match at each frontier node: its length and the tokens since its latest occurrence."""
        return [self.match(node) for node in self.frontier]

    @cached_property
    def matches(self) -> list[int]:
        return [length for length, _ in self.found]

    def _scores(self, nodes: Sequence[int]) -> list[float]:
        log_s = self.tree.log_s
        return [max(log_s[node], LOG_S_FLOOR) for node in nodes]

    def _depth(self, nodes: Sequence[int]) -> float:
        depth = self.tree.depth
        return _mean([depth[node] for node in nodes], 0.0)


@dataclass(frozen=True)
class Signal:
    """One signal: what it means, its type in the log, its value for an empty set, and how it is computed.

    cost_us is its typical time in microseconds beyond what other signals share. `trajectory` signals depend on earlier
    rounds, so the replay computes them and the log does not hold them.
    """

    name: str
    definition: str
    dtype: str
    cost_us: float
    empty: float
    compute: Callable[[State], float]
    trajectory: bool = False


def _mean(values: Sequence[float], empty: float) -> float:
    return math.fsum(values) / len(values) if values else empty


def _quantile(values: Sequence[float], share: float, empty: float) -> float:
    """The linearly interpolated quantile."""
    if not values:
        return empty
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _share(nodes: Sequence[int], chosen: Sequence[int]) -> float:
    return len(chosen) / len(nodes) if nodes else 0.0


def _leaf_ratio(state: State) -> float:
    children = state.tree.children
    return _share(state.frontier, [node for node in state.frontier if not children[node]])


def _past_ratio(state: State) -> float:
    depth = state.tree.depth
    present = {depth[node] for node in state.frontier}
    return _share(state.reselected, [node for node in state.reselected if depth[node] not in present])


def _overlap(state: State) -> float:
    frontier = set(state.frontier)
    return _share(state.reselected, [node for node in state.reselected if node in frontier])


def _expected(state: State) -> float:
    return math.fsum(map(math.exp, state.tree.log_s[1:]))


def _recency(state: State) -> float:
    return _mean([math.log1p(since) for length, since in state.found if length], 0.0)


def _declare(*signals: Signal) -> dict[str, Signal]:
    return {signal.name: signal for signal in signals}


F = "float32"
SIGNALS: dict[str, Signal] = _declare(
    Signal("step", "the step k about to be decided", "int8", 0, 0, lambda s: s.step),
    Signal("medium_calls", "medium steps taken earlier in this round", "int8", 0, 0, lambda s: s.mask.bit_count()),
    Signal("mask", "earlier decisions as a bit mask, bit 0 is step 1", "int16", 0, 0, lambda s: s.mask),
    Signal("log_prompt_length", "log1p of the prompt's tokens", F, 0.2, 0, lambda s: math.log1p(s.prompt_length)),
    Signal("answer_position", "answer tokens before the root", "int32", 0, 0, lambda s: s.answer_position),
    Signal("depth_before", "mean depth of the frontier Top_W(N_k)", F, 1, 0, lambda s: s.frontier_depth),
    Signal("leaf_ratio_before", "share of the frontier with no children", F, 1, 0, _leaf_ratio),
    Signal(
        "pre_reselect_score", "mean log s of the reselected frontier Top_W(V - P)", F, 2, LOG_S_FLOOR,
        lambda s: s.reselected_score,
    ),
    Signal(
        "pre_reselect_past_ratio", "share of the reselected frontier whose depth no frontier node has", F, 2, 0,
        _past_ratio,
    ),
    Signal("pre_reselect_overlap", "share of the reselected frontier that is in the frontier", F, 2, 0, _overlap),
    Signal(
        "collapse_debt", "max(0, mean depth of the frontier - mean depth of the reselected one)", F, 2, 0,
        lambda s: max(0.0, s.frontier_depth - s.reselected_depth),
    ),
    Signal("frontier_size", "nodes in the frontier", "int16", 0.5, 0, lambda s: len(s.frontier)),
    Signal("tree_size", "nodes beside the root", "int16", 0.1, 0, lambda s: len(s.tree.depth) - 1),
    Signal("pool_size", "nodes in V - P", "int16", 1, 0, lambda s: len(s.pool)),
    Signal("frontier_score_mean", "mean log s of the frontier", F, 1, LOG_S_FLOOR, lambda s: s.frontier_score),
    Signal(
        "frontier_score_median", "median log s of the frontier", F, 1, LOG_S_FLOOR,
        lambda s: _quantile(s.frontier_scores, 0.5, LOG_S_FLOOR),
    ),
    Signal(
        "frontier_score_p90", "90th percentile of the frontier's log s", F, 1, LOG_S_FLOOR,
        lambda s: _quantile(s.frontier_scores, 0.9, LOG_S_FLOOR),
    ),
    Signal(
        "reselect_depth_change", "mean depth of the reselected frontier - that of the frontier", F, 2, 0,
        lambda s: s.reselected_depth - s.frontier_depth,
    ),
    Signal(
        "reselect_score_change", "mean log s of the reselected frontier - that of the frontier", F, 2, 0,
        lambda s: s.reselected_score - s.frontier_score,
    ),
    Signal("match_mean", "mean n-gram match length over the frontier", F, 3, 0, lambda s: _mean(s.matches, 0.0)),
    Signal(
        "match_p90", "90th percentile of the frontier's n-gram match lengths", F, 3, 0,
        lambda s: _quantile(s.matches, 0.9, 0.0),
    ),
    Signal("match_recency", "mean log1p(tokens since the match) over matching frontier nodes", F, 3, 0, _recency),
    Signal("root_match", "n-gram match length at the root", "int8", 1, 0, lambda s: s.match(0)[0]),
    Signal("root_recency", "log1p(tokens since the root's match)", F, 1, 0, lambda s: math.log1p(s.match(0)[1])),
    Signal(
        "target_entropy", "entropy (nats) of the target's distribution that chose the root", F, 150, 0,
        lambda s: s.target_entropy,
    ),
    Signal(
        "target_margin", "gap (nats) between its two best tokens there", F, 150, 0, lambda s: s.target_margin
    ),
    Signal("medium_tokens", "nodes a medium step would process now, lag aside", "int16", 15, 0, lambda s: s.planned()),
    Signal("expected_accepted", "sum of s over the nodes beside the root", F, 5, 0, _expected),
    Signal(
        "lag", "committed tokens before the root that the medium drafter has not processed (0 after a call)", "int32",
        0, 0, lambda s: s.lag, trajectory=True,
    ),
    Signal(
        "accepted_last", "accepted length of the last round", "int16", 0, 0,
        lambda s: s.accepted[-1] if s.accepted else 0, trajectory=True,
    ),
    Signal(
        "accepted_mean4", "mean accepted length of the last four rounds", F, 0.5, 0,
        lambda s: _mean(s.accepted[-4:], 0.0), trajectory=True,
    ),
)  # fmt: skip

LOGGED = [name for name, signal in SIGNALS.items() if not signal.trajectory]
GIVEN = ("step", "mask", "lag")  # known before any is worked out
UNCERTAINTY = ("target_entropy", "target_margin")  # these take a pass over the vocabulary
RELEASE = [  # the six that the paper's release reads (spec section 4)
    "depth_before", "leaf_ratio_before", "pre_reselect_score", "pre_reselect_past_ratio", "pre_reselect_overlap",
    "collapse_debt",
]  # fmt: skip


def compute(names: Sequence[str], state: State) -> dict[str, Any]:
    """The named signals of a state; nothing is worked out that they do not read."""
    return {name: SIGNALS[name].compute(state) for name in names}


class Reading(dict[str, Any]):
    """The signals that a decision has read so far: each is worked out when it is first asked for.

    On its way to a leaf a tree asks for a few of the signals that it knows. `begun` is the round's state, of which only
    step, mask and lag change. Raises ValueError for a signal that is not finite.
    """

    def __init__(self, begun: State, step: int, mask: int, lag: int) -> None:
        super().__init__(step=step, mask=mask, lag=lag)
        self.begun = begun

    @cached_property
    def state(self) -> State:
        return replace(self.begun, step=self["step"], mask=self["mask"], lag=self["lag"])

    def __missing__(self, name: str) -> Any:
        value = self[name] = SIGNALS[name].compute(self.state)
        if not math.isfinite(value):
            raise ValueError(f"signal {name!r} is {value}")
        return value
