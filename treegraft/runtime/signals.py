"""The signals that a schedule may read before a decision, each declared once (spec section 4).

This list drives the log's columns, the fit, the artifact and the runtime. Nothing here needs torch or a model.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass
class State:
    """A round just before step `step` (1..K). Sets that several signals share are worked out at most once.

    match(node) gives the n-gram match length at a node and the tokens since its latest occurrence; planned() gives the
    number of nodes that a medium step would process. Neither calls the medium drafter.
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
        tree = self.tree
        return sorted(nodes, key=lambda node: (-tree.log_s[node], tree.depth[node], node))[: self.width]

    @cached_property
    def frontier(self) -> list[int]:
        """Top_W(N_k), which a small step would expand."""
        return self._top(self.tree.new)

    @cached_property
    def pool(self) -> list[int]:
        """V \\ P, the candidates of a medium step."""
        return [node for node, visited in enumerate(self.tree.visited) if not visited]

    @cached_property
    def reselected(self) -> list[int]:
        """Top_W(V \\ P) by present scores, which a medium step would start from."""
        return self._top(self.pool)

    @cached_property
    def frontier_scores(self) -> list[float]:
        return sorted(max(self.tree.log_s[node], LOG_S_FLOOR) for node in self.frontier)

    @cached_property
    def reselected_scores(self) -> list[float]:
        return sorted(max(self.tree.log_s[node], LOG_S_FLOOR) for node in self.reselected)

    @cached_property
    def matches(self) -> list[int]:
        return sorted(self.match(node)[0] for node in self.frontier)

    def mean_depth(self, nodes: Sequence[int]) -> float:
        return _mean([self.tree.depth[node] for node in nodes], 0.0)


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


def _quantile(ordered: Sequence[float], share: float, empty: float) -> float:
    """The linearly interpolated quantile of ascending values."""
    if not ordered:
        return empty
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _share(nodes: Sequence[int], holds: Callable[[int], bool]) -> float:
    return sum(map(holds, nodes)) / len(nodes) if nodes else 0.0


def _leaf_ratio(state: State) -> float:
    return _share(state.frontier, lambda node: not state.tree.children[node])


def _past_ratio(state: State) -> float:
    present = {state.tree.depth[node] for node in state.frontier}
    return _share(state.reselected, lambda node: state.tree.depth[node] not in present)


def _overlap(state: State) -> float:
    frontier = set(state.frontier)
    return _share(state.reselected, lambda node: node in frontier)


def _expected(state: State) -> float:
    return math.fsum(math.exp(log_s) for log_s in state.tree.log_s[1:])


def _score_gain(state: State) -> float:
    return _mean(state.reselected_scores, LOG_S_FLOOR) - _mean(state.frontier_scores, LOG_S_FLOOR)


def _recency(state: State) -> float:
    found = [state.match(node) for node in state.frontier]
    return _mean([math.log1p(since) for length, since in found if length], 0.0)


def _declare(*signals: Signal) -> dict[str, Signal]:
    return {signal.name: signal for signal in signals}


F = "float32"
SIGNALS: dict[str, Signal] = _declare(
    Signal("step", "the step k about to be decided", "int8", 0, 0, lambda s: s.step),
    Signal("medium_calls", "medium steps taken earlier in this round", "int8", 0, 0, lambda s: s.mask.bit_count()),
    Signal("mask", "earlier decisions as a bit mask, bit 0 is step 1", "int16", 0, 0, lambda s: s.mask),
    Signal("log_prompt_length", "log1p of the prompt's tokens", F, 0.2, 0, lambda s: math.log1p(s.prompt_length)),
    Signal("answer_position", "answer tokens before the root", "int32", 0, 0, lambda s: s.answer_position),
    Signal("depth_before", "mean depth of the frontier Top_W(N_k)", F, 1, 0, lambda s: s.mean_depth(s.frontier)),
    Signal("leaf_ratio_before", "share of the frontier with no children", F, 1, 0, _leaf_ratio),
    Signal(
        "pre_reselect_score", "mean log s of the reselected frontier Top_W(V - P)", F, 2, LOG_S_FLOOR,
        lambda s: _mean(s.reselected_scores, LOG_S_FLOOR),
    ),
    Signal(
        "pre_reselect_past_ratio", "share of the reselected frontier whose depth no frontier node has", F, 2, 0,
        _past_ratio,
    ),
    Signal("pre_reselect_overlap", "share of the reselected frontier that is in the frontier", F, 2, 0, _overlap),
    Signal(
        "collapse_debt", "max(0, mean depth of the frontier - mean depth of the reselected one)", F, 2, 0,
        lambda s: max(0.0, s.mean_depth(s.frontier) - s.mean_depth(s.reselected)),
    ),
    Signal("frontier_size", "nodes in the frontier", "int16", 0.5, 0, lambda s: len(s.frontier)),
    Signal("tree_size", "nodes beside the root", "int16", 0.1, 0, lambda s: len(s.tree.depth) - 1),
    Signal("pool_size", "nodes in V - P", "int16", 1, 0, lambda s: len(s.pool)),
    Signal(
        "frontier_score_mean", "mean log s of the frontier", F, 1, LOG_S_FLOOR,
        lambda s: _mean(s.frontier_scores, LOG_S_FLOOR),
    ),
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
        lambda s: s.mean_depth(s.reselected) - s.mean_depth(s.frontier),
    ),
    Signal(
        "reselect_score_change", "mean log s of the reselected frontier - that of the frontier", F, 2, 0, _score_gain
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
RELEASE = [  # the six that the paper's release reads (spec section 4)
    "depth_before", "leaf_ratio_before", "pre_reselect_score", "pre_reselect_past_ratio", "pre_reselect_overlap",
    "collapse_debt",
]  # fmt: skip


def compute(names: Sequence[str], state: State) -> dict[str, Any]:
    """The named signals of a state."""
    return {name: SIGNALS[name].compute(state) for name in names}
