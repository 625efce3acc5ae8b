"""Replay schedules on a log, exactly and without a model, and find the best that any could do (spec sections 5 and 6).

All answers advance in lockstep, one round at a time: the decisions come from the logged signals, the time from a
latency profile. A live run with the same plan makes the same rounds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from treegraft.data.log import Answer, LogError, node
from treegraft.runtime.decode import AUTOREGRESSIVE, Plan
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.latency import Asking, LatencyProfile
from treegraft.runtime.scheduler import Artifact, Mask, Rules, Schedule, TreeModel
from treegraft.runtime.signals import LOGGED, SIGNALS
from treegraft.runtime.size import Cut

TRAJECTORY = [name for name, signal in SIGNALS.items() if signal.trajectory]
NAMES = [*LOGGED, *TRAJECTORY]  # the columns of every matrix of signals here
LAG = NAMES.index("lag")
DRAWS = 1000  # of a bootstrap
FIGURES = ("tokens", "ms", "rounds", "medium_calls", "accepted")  # that add up over answers


class Policy(Asking, Protocol):
    """A schedule that decides for many states at once, from the signals that it reads."""

    def decide_many(self, step: int, masks: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Decisions (n,) bool before step `step`, from earlier decisions (n,) and all signals (n, len(NAMES))."""
        ...


@dataclass
class Positions:
    """Every position of every answer as one row; R rows, M = 2^K masks, N = 2^K - 1 decision points, S signals.

    `signals` (R, N, S) has the logged signals at `node(step, mask)`; the leaf arrays are those of Answer, row by row.
    """

    answers: list[Answer]
    first: np.ndarray  # (answers,) the row of position 0
    answer: np.ndarray  # (R,)
    position: np.ndarray  # (R,) answer tokens before the root
    context: np.ndarray  # (R,) tokens before the root, prompt included
    remaining: np.ndarray  # (R,) answer tokens after the root
    signals: np.ndarray
    log_s: np.ndarray
    ranks: np.ndarray
    q: np.ndarray
    tokens: np.ndarray
    possible: np.ndarray

    @property
    def depth(self) -> int:
        return self.tokens.shape[2]


def flatten(answers: "Sequence[Answer] | Positions") -> Positions:
    """One table of all positions; raises LogError where an answer lacks some, since a replay could land there."""
    if isinstance(answers, Positions):
        return answers
    answers = list(answers)
    if not answers:
        raise LogError("no answers to replay; collect some prompts first")
    for answer in answers:
        if not np.array_equal(answer.positions, np.arange(answer.length - 1)):
            raise LogError(
                f"{answer.file}/{answer.prompt} turn {answer.turn}: {len(answer.positions)} of {answer.length - 1} "
                "positions are logged; an exact replay needs them all: collect with --positions every:1"
            )
    shapes = {(answer.tokens.shape[2], answer.log_s.shape[2]) for answer in answers}
    if len(shapes) > 1:
        raise LogError(f"answers of different drafting, (K, B) in {sorted(shapes)}, cannot be replayed together")
    lengths = np.array([len(answer.positions) for answer in answers])
    position = np.concatenate([answer.positions for answer in answers]).astype(int)
    prompt_length = np.repeat([answer.prompt_length for answer in answers], lengths)
    names = ("signals", "log_s", "ranks", "q", "tokens", "possible")
    return Positions(
        answers, np.cumsum(lengths) - lengths, np.repeat(np.arange(len(answers)), lengths), position,
        prompt_length + position, np.repeat([a.length - 1 for a in answers], lengths) - position,
        **{name: np.concatenate([getattr(answer, name) for answer in answers]) for name in names},
    )  # fmt: skip


@dataclass
class Leaves:
    """What some trees come to under a cut and a profile; arrays of one shape.

    `kept` nodes are verified, `accepted` of them agree with the text, `emitted` tokens come out. `ms` is the round's
    time, lag aside; `first` are the nodes of the round's first medium call (0: no call), `calls` its medium calls.
    """

    kept: np.ndarray
    accepted: np.ndarray
    emitted: np.ndarray
    ms: np.ndarray
    first: np.ndarray
    calls: np.ndarray


def value_leaves(log: Positions, rows: np.ndarray, masks: np.ndarray, cut: Cut, profile: LatencyProfile) -> Leaves:
    """The leaves of `masks` (n,) at `rows` (n,)."""
    context = log.context[rows]
    kept = cut.sizes(log.log_s[rows, masks], context)
    accepted = (log.ranks[rows, masks] < kept[:, None]).sum(axis=1)
    # No bonus token after the end of the answer.
    emitted = np.minimum(accepted + 1, log.remaining[rows])
    drafting_ms, first, calls = _drafting_ms(log, rows, masks, profile)
    ms = profile.target(kept + 1, context) + drafting_ms
    return Leaves(kept, accepted, emitted, ms, first, calls)


def _drafting_ms(
    log: Positions, rows: np.ndarray, masks: np.ndarray, profile: LatencyProfile
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A round's time outside the target, lag aside; the nodes of its first medium call; its medium calls; all (n,)."""
    tokens = log.tokens[rows, masks]
    called = tokens > 0
    calls = called.sum(axis=1)
    medium_ms = np.where(called, profile.medium(tokens, log.context[rows][:, None]), 0.0).sum(axis=1)
    medium_ms += (calls > 0) * profile.medium_first_ms
    medium_steps = np.bitwise_count(masks)
    steps_ms = medium_steps * profile.medium_step_ms + (log.depth - medium_steps) * profile.small_step_ms
    first = np.where(calls > 0, tokens[np.arange(len(rows)), called.argmax(axis=1)], 0)
    return medium_ms + steps_ms + profile.round_ms, first, calls


def all_leaves(log: Positions, cut: Cut, profile: LatencyProfile) -> Leaves:
    """The leaves of every mask at every position, arrays (R, M)."""
    rows = np.arange(len(log.position))
    columns = [value_leaves(log, rows, np.full_like(rows, mask), cut, profile) for mask in range(1 << log.depth)]
    return Leaves(**{name: np.stack([getattr(c, name) for c in columns], axis=1) for name in vars(columns[0])})


def lag_ms(profile: LatencyProfile, lag: Any, first: Any, context: Any) -> np.ndarray:
    """What catching up on `lag` tokens adds to a first call of `first` nodes (0: there is no call)."""
    return np.where(first, profile.medium(lag + first, context) - profile.medium(first, context), 0.0)


def next_lag(lag: Any, accepted: Any, q: Any, called: Any) -> np.ndarray:
    """The lag that a round leaves behind (spec section 5)."""
    return np.where(called, accepted - np.minimum(accepted, q), lag + 1 + accepted)


def trajectory(lag: np.ndarray, recent: np.ndarray, rounds: np.ndarray) -> np.ndarray:
    """The trajectory signals (n, len(TRAJECTORY)), as live rounds read them.

    `lag` (n,), `rounds` (n,) so far, `recent` (n, 4) the latest accepted lengths, newest first, 0 where there are none.
    """
    found = {
        "lag": lag, "accepted_last": recent[:, 0],
        "accepted_mean4": recent.sum(axis=1) / np.clip(rounds, 1, recent.shape[1]),
    }  # fmt: skip
    return np.stack([np.asarray(found[name], np.float64) for name in TRAJECTORY], axis=1)


def decide_many(schedule: Schedule | Artifact | Policy, step: int, masks: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The decisions (n,) bool of any schedule, as `decide` makes them one by one; arguments as Policy has them."""
    if isinstance(schedule, Artifact):
        known = np.isfinite(values[:, [NAMES.index(name) for name in schedule.reads]]).all(axis=1)
        return np.where(
            known, decide_many(schedule.schedule, step, masks, values), Mask(schedule.fallback).decide(step, 0, {})
        )
    if isinstance(schedule, Mask):
        return np.full(len(masks), schedule.decide(step, 0, {}))
    if isinstance(schedule, Rules):
        made = np.zeros(len(masks), dtype=bool)
        for rule in schedule.rules:
            if rule.step == step:
                made |= np.all([_meets(values, *condition) for condition in rule.conditions], axis=0)
        return made
    if isinstance(schedule, TreeModel):
        return np.array(schedule.value)[leaf_of(schedule, values)] > 0
    return schedule.decide_many(step, masks, values)


def _meets(values: np.ndarray, name: str, operator: str, threshold: float) -> np.ndarray:
    read = values[:, NAMES.index(name)]
    return read <= threshold if operator == "<=" else read > threshold


def leaf_of(tree: TreeModel, values: np.ndarray) -> np.ndarray:
    """The node (n,) of a tree model in which each state, all signals (n, len(NAMES)), ends up."""
    feature, threshold, left, right = (np.array(c) for c in (tree.feature, tree.threshold, tree.left, tree.right))
    read = values[:, [NAMES.index(name) for name in tree.reads]]
    nodes, inner = np.zeros(len(values), dtype=int), np.arange(len(values))
    while len(inner := inner[feature[nodes[inner]] >= 0]):
        at = nodes[inner]
        nodes[inner] = np.where(read[inner, feature[at]] <= threshold[at], left[at], right[at])
    return nodes


@dataclass
class Replay:
    """What a schedule did on each answer (arrays over answers), prompt included in `ms`, not in `decode_ms`.

    `trace` has one entry a round, answers interleaved, in order within an answer: answer, position, lag (before the
    round), mask, tokens (n, K), kept, accepted, q.
    """

    answers: list[Answer]
    tokens: np.ndarray
    ms: np.ndarray
    decode_ms: np.ndarray
    rounds: np.ndarray
    medium_calls: np.ndarray
    accepted: np.ndarray
    trace: dict[str, np.ndarray]

    @property
    def rho(self) -> float:
        """Tokens per ms of decoding; the first token comes out of the prompt's forward."""
        return rate(self.tokens, self.decode_ms)

    def records(self, schedule: str) -> list["Record"]:
        """One record an answer, for `summarise`."""
        columns = [getattr(self, name).tolist() for name in FIGURES]
        return [Record(a.file, a.prompt, schedule, *row) for a, *row in zip(self.answers, *columns)]


@dataclass
class Record:
    """What `summarise` reads of a decoded answer; `ms` includes the prompt."""

    file: str
    prompt: str
    schedule: str
    tokens: int
    ms: float
    rounds: int
    medium_calls: int
    accepted: int


def rate(tokens: np.ndarray, decode_ms: Any) -> float:
    """rho: tokens after each answer's first per ms of decoding; 0 where there are none."""
    total = float(np.sum(decode_ms))
    return float((tokens - 1).sum()) / total if total else 0.0


def replay(
    answers: Sequence[Answer] | Positions,
    schedule: Schedule | Artifact | Policy,
    cut: Cut,
    profile: LatencyProfile,
    drafting: Drafting,
) -> Replay:
    """Replay a schedule; drafting of depth 0 is autoregressive decoding.

    Raises LogError where the log lacks positions, was collected with another K or B, or lacks a chosen mask.
    """
    log = flatten(answers)
    if drafting.depth == 0:
        return _autoregressive(log, profile)

    def decide(step: int, _: np.ndarray, masks: np.ndarray, values: np.ndarray) -> np.ndarray:
        return decide_many(schedule, step, masks, values)

    return _run(log, np.arange(len(log.answers)), decide, schedule, cut, profile, drafting)


def race(
    log: Positions, entrants: int, decide: Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray],
    like: Asking, cut: Cut, profile: LatencyProfile, drafting: Drafting,
) -> np.ndarray:  # fmt: skip
    """Replay many schedules at once: decode ms (entrants, answers).

    All of them read what the schedule `like` reads: `decide(step, entrant (n,), masks (n,), values)` gets all signals
    where it reads any.
    """
    count = len(log.answers)
    lanes = np.tile(np.arange(count), entrants)
    run = _run(log, lanes, lambda step, lane, *state: decide(step, lane // count, *state), like, cut, profile, drafting)
    return run.decode_ms.reshape(entrants, count)


def _run(
    log: Positions,
    lanes: np.ndarray,
    decide: Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray],
    like: Asking,
    cut: Cut,
    profile: LatencyProfile,
    drafting: Drafting,
) -> Replay:
    """Advance the answers `lanes` (n,), which may repeat, in lockstep; `decide` gets signals where `like` reads any."""
    check_drafting(log, drafting)
    profile, reads = profile.deciding(like, log.depth), bool(like.reads)
    answers = [log.answers[lane] for lane in lanes]
    tokens = np.array([answer.length for answer in answers])
    prompt = np.array([answer.prompt_length for answer in answers])
    decode_ms, rounds, calls, total = np.zeros(len(lanes)), *np.zeros((3, len(lanes)), dtype=int)
    row, lag = log.first[lanes].copy(), prompt.copy()
    recent = np.zeros((len(lanes), 4), dtype=int)
    room = np.array([drafting.may_call(mask) for mask in range(1 << log.depth)])
    trace: list[dict[str, np.ndarray]] = []
    active = np.flatnonzero(tokens > 1)
    while len(active):
        rows, masks = row[active], np.zeros(len(active), dtype=int)
        called = np.zeros(len(active), dtype=bool)
        values = np.empty((len(active), len(NAMES) if reads else 0))
        if reads:
            values[:, len(LOGGED) :] = trajectory(lag[active], recent[active], rounds[active])
        for step in range(1, log.depth + 1):
            if reads:
                values[:, : len(LOGGED)] = log.signals[rows, node(step, masks)]
                values[called, LAG] = 0.0  # the round's first call has caught up
            invoke = room[masks] & decide(step, active, masks, values)
            masks |= invoke << (step - 1)
            called |= log.tokens[rows, masks, step - 1] > 0
        if not log.possible[rows, masks].all():
            raise LogError(
                f"the log has no mask {int(masks[~log.possible[rows, masks]][0]):#b}: it was collected with fewer "
                "medium calls a round; collect again with --medium-calls as the schedule has it"
            )
        leaves = value_leaves(log, rows, masks, cut, profile)
        q = log.q[rows, masks]
        trace.append({
            "answer": lanes[active], "position": log.position[rows], "lag": lag[active], "mask": masks,
            "tokens": log.tokens[rows, masks], "kept": leaves.kept, "accepted": leaves.accepted, "q": q,
        })  # fmt: skip
        decode_ms[active] += leaves.ms + lag_ms(profile, lag[active], leaves.first, log.context[rows])
        rounds[active] += 1
        calls[active] += leaves.calls
        total[active] += leaves.accepted
        lag[active] = next_lag(lag[active], leaves.accepted, q, called)
        recent[active] = np.column_stack([leaves.accepted, recent[active, :-1]])
        row[active] += leaves.accepted + 1
        active = active[log.remaining[rows] > leaves.accepted + 1]
    names = ("answer", "position", "lag", "mask", "tokens", "kept", "accepted", "q")
    none = {name: np.zeros((0, log.depth) if name == "tokens" else 0, dtype=int) for name in names}
    joined = {name: np.concatenate([none[name], *(part[name] for part in trace)]) for name in names}
    ms = profile.target(prompt, 0) + decode_ms
    return Replay(answers, tokens, ms, decode_ms, rounds, calls, total, joined)


def check_drafting(log: Positions, drafting: Drafting) -> None:
    """Raise LogError where the log's trees have another K or B than `drafting`."""
    for name, letter, held, wanted in (
        ("depth", "K", log.depth, drafting.depth), ("budget", "B", log.log_s.shape[2], drafting.budget)
    ):  # fmt: skip
        if held != wanted:
            raise LogError(
                f"the log was collected with {letter} = {held}, but the schedule drafts with {letter} = {wanted}; "
                f"collect a log with --{name} {wanted}, or use a schedule made for this one"
            )


def _autoregressive(log: Positions, profile: LatencyProfile) -> Replay:
    """The first token by the prompt's forward, then one forward a token."""
    tokens = np.array([answer.length for answer in log.answers])
    prompt = np.array([answer.prompt_length for answer in log.answers])
    decode_ms = np.bincount(log.answer, profile.target(1, log.context), minlength=len(tokens))
    none = np.zeros_like(tokens)
    ms = profile.target(prompt, 0) + decode_ms
    return Replay(log.answers, tokens, ms, decode_ms, tokens - 1, none, none, {})


def fixed_point(
    answers: Sequence[Answer] | Positions,
    schedule: Schedule | Artifact | Policy,
    profile: LatencyProfile,
    drafting: Drafting,
    rho: float | None = None,
) -> tuple[float, Replay]:
    """rho (tokens per ms) of a schedule whose cut weighs time by that same rho, and its replay there.

    Dinkelbach's iteration from `rho` (default: that of autoregressive decoding). The cut goes by expected, not by
    realised tokens, so on a small log it may cycle: then it is the rho of the fastest replay seen.
    """
    log = flatten(answers)
    rho = rho or _autoregressive(log, profile).rho
    runs: dict[float, Replay] = {}
    while rho not in runs and len(runs) < 20:
        run = runs[rho] = replay(log, schedule, Cut("worth", rho, profile), profile, drafting)
        if abs(run.rho - rho) <= 1e-9 * rho or not run.rho:
            return rho, run
        rho = run.rho
    rho = max(runs, key=lambda tried: runs[tried].rho)
    return rho, runs[rho]


def best_mask(answers: Sequence[Answer] | Positions, profile: LatencyProfile, drafting: Drafting) -> int:
    """The fixed mask of most replayed tokens per second (the lowest on ties), at its own fixed point of rho."""
    log = flatten(answers)
    masks = np.array([m for m in range(1 << log.depth) if log.possible[:, m].all() and _within(drafting, m)])
    rho = _autoregressive(log, profile).rho
    tokens = np.array([answer.length for answer in log.answers])
    best, tried = (0.0, 0), set[float]()
    while rho not in tried and len(tried) < 20:
        tried.add(rho)
        ms = race(log, len(masks), lambda step, entrant, *_: (masks[entrant] >> (step - 1) & 1).astype(bool), Mask(0),
                  Cut("worth", rho, profile), profile, drafting).sum(axis=1)  # fmt: skip
        at = int(ms.argmin())
        found = rate(tokens, ms[at])
        best = max(best, (found, -int(masks[at])))
        if abs(found - rho) <= 1e-9 * rho:
            return int(masks[at])
        rho = found
    return -best[1]


def named_plan(
    name: str, schedule: Schedule, answers: Sequence[Answer] | Positions, profile: LatencyProfile, drafting: Drafting
) -> Plan:
    """A schedule with the cut that serves it best on a log: "worth" at its fixed point of rho."""
    rho, _ = fixed_point(answers, schedule, profile, drafting)
    return Plan(name, schedule, drafting, Cut("worth", rho, profile))


def _within(drafting: Drafting, mask: int) -> bool:
    """Whether the budget of medium calls lets a fixed mask run as it is."""
    return drafting.medium_calls is None or mask.bit_count() <= drafting.medium_calls


@dataclass
class Oracle:
    """The least decode time (ms) of each answer: over masks with the cut as given, and over masks and cuts."""

    masks_ms: np.ndarray
    cuts_ms: np.ndarray


def oracle(answers: Sequence[Answer] | Positions, cut: Cut, profile: LatencyProfile) -> Oracle:
    """A bound on what any schedule can do, knowing the text (spec section 6). Edges take the masks that were logged."""
    log = flatten(answers)
    rows, masks = (index.ravel() for index in np.indices(log.q.shape))
    leaves = all_leaves(log, cut, profile)
    by_mask = _Edges(leaves.accepted, leaves.ms, leaves.first, np.minimum(log.q, leaves.accepted), log.possible)
    # With just enough nodes for the a-th accepted one, a = 0..accepted: arrays (R, M, K + 1).
    shape = (*log.q.shape, log.depth + 1)
    accepted = np.broadcast_to(np.arange(log.depth + 1), shape)
    needed = np.concatenate([np.zeros((*log.q.shape, 1), int), log.ranks + 1], axis=2)
    budget = log.log_s.shape[2]
    drafting_ms, first, _ = (part.reshape(log.q.shape) for part in _drafting_ms(log, rows, masks, profile))
    ms = drafting_ms[..., None] + profile.target(needed + 1, log.context[:, None, None])
    by_cut = _Edges(
        accepted, ms, np.broadcast_to(first[..., None], shape), np.minimum(log.q[..., None], accepted),
        log.possible[..., None] & (needed <= budget),
    )  # fmt: skip
    return Oracle(*(np.array([_shortest(log, i, edges, profile) for i in range(len(log.answers))])
                    for edges in (by_mask, by_cut)))  # fmt: skip


@dataclass
class _Edges:
    """What a round from each position may do, arrays (R, ...): accepted tokens, ms, first call's nodes, processed."""

    accepted: np.ndarray
    ms: np.ndarray
    first: np.ndarray
    processed: np.ndarray
    possible: np.ndarray


def _shortest(log: Positions, index: int, edges: _Edges, profile: LatencyProfile) -> float:
    """The least decode time of one answer.

    A state is a position t and the answer tokens u that the medium drafter has processed, so that lag = t - u; before
    its first call the lag is t + prompt length. A call's successor does not depend on u, and without a call u stays.
    """
    answer = log.answers[index]
    length, depth = answer.length, log.depth
    # least[t, 0] is before the first call, least[t, u + 1] after u tokens; nothing is left to pay from t = length - 1.
    least = np.zeros((length + depth + 1, length + depth + 2))
    for t in range(length - 2, -1, -1):
        row = log.first[index] + t
        possible = edges.possible[row]
        accepted, ms, first, processed = (
            part[row][possible] for part in (edges.accepted, edges.ms, edges.first, edges.processed)
        )
        after = t + 1 + accepted
        cost = np.full(depth + 1, np.inf)
        np.minimum.at(cost, accepted[first == 0], ms[first == 0])
        stay = (cost[:, None] + least[t + 1 : t + 2 + depth, : t + 2]).min(axis=0)
        called = first > 0
        lag = np.concatenate([[t + answer.prompt_length], t - np.arange(t + 1)])
        if called.any():
            done = np.full(int(first.max()) + 1, np.inf)
            np.minimum.at(done, first[called], (ms + least[after, t + 2 + processed])[called])
            sizes = np.flatnonzero(np.isfinite(done))
            context = answer.prompt_length + t
            call = done[sizes][:, None] + lag_ms(profile, lag[None, :], sizes[:, None], context)
            stay = np.minimum(stay, call.min(axis=0))
        least[t, : t + 2] = stay
    return float(least[0, 0])


def summarise(records: Sequence[Any]) -> dict[str, Any]:
    """Figures by file and overall of decoded answers, live or replayed.

    Records have the fields of Record; some have the schedule `autoregressive`. speedup is total tokens over total time
    against it, with a 95 % interval by a bootstrap over prompts, the same draws for both. Raises ValueError where a
    schedule misses some prompts. "over" compares each schedule with every other one.
    """
    schedules = list(dict.fromkeys(record.schedule for record in records))
    if AUTOREGRESSIVE.name not in schedules:
        raise ValueError(f"no records of {AUTOREGRESSIVE.name!r}, which speedups are measured against; decode so too")
    sums: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for record in records:
        prompts = sums.setdefault((record.file, record.prompt), {})
        prompts[record.schedule] = prompts.get(record.schedule, 0) + np.array([getattr(record, f) for f in FIGURES])
    for (file, prompt), prompts in sums.items():
        if missing := [name for name in schedules if name not in prompts]:
            raise ValueError(f"{file}/{prompt}: no record of schedule {missing[0]!r}; all need the same prompts")

    def figures(keys: list[tuple[str, str]]) -> dict[str, dict[str, Any]]:
        tables = {name: np.array([sums[key][name] for key in keys]) for name in schedules}
        base = tables[AUTOREGRESSIVE.name]
        made = {}
        for name, table in tables.items():
            tokens, ms, rounds, calls, accepted = table.sum(axis=0)
            draws = speedup_draws(table[:, 0], table[:, 1], base[:, 0], base[:, 1])
            made[name] = {
                "tokens_per_second": float(1e3 * tokens / ms),
                "speedup": float(tokens / ms * base[:, 1].sum() / base[:, 0].sum()),
                "speedup_interval": interval(draws),
                "accepted_per_round": float(accepted / rounds) if rounds else 0.0,
                "medium_calls_per_round": float(calls / rounds) if rounds else 0.0,
                "rounds": int(rounds),
                "tokens": int(tokens),
                "over": {other: _over(table, tables[other]) for other in schedules if other != name},
            }
        return made

    files = dict.fromkeys(file for file, _ in sums)
    by_file = {file: figures([key for key in sums if key[0] == file]) for file in files}
    return {"by_file": by_file, "overall": figures(list(sums))}


def _over(table: np.ndarray, other: np.ndarray) -> dict[str, Any]:
    """Tokens per second over another schedule's, with a 95 % interval paired by prompt; tables (prompts, FIGURES)."""
    draws = speedup_draws(table[:, 0], table[:, 1], other[:, 0], other[:, 1])
    ratio = float(table[:, 0].sum() / table[:, 1].sum() * other[:, 1].sum() / other[:, 0].sum())
    return {"gain": ratio, "interval": interval(draws)}


def speedup_draws(tokens: np.ndarray, ms: np.ndarray, base_tokens: np.ndarray, base_ms: np.ndarray) -> np.ndarray:
    """DRAWS bootstrap values of the ratio of two schedules' tokens per time; all arguments per prompt, shape (n,)."""
    index = np.random.default_rng(0).integers(0, len(tokens), (DRAWS, len(tokens)))
    total = [column[index].sum(axis=1) for column in (tokens, ms, base_tokens, base_ms)]
    return (total[0] / total[1]) / (total[2] / total[3])


def interval(draws: np.ndarray) -> list[float]:
    """The 95 % interval of bootstrap draws."""
    return [float(bound) for bound in np.quantile(draws, (0.025, 0.975))]
