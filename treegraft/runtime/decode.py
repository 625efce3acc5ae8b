"""The lossless tree decoder: draft a tree, verify it in one target forward, commit what the target agrees with."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch

from treegraft.runtime import signals, static
from treegraft.runtime.drafting import Drafting, medium_step, plan_medium, small_step
from treegraft.runtime.forward import TreeForward
from treegraft.runtime.medium import LMDrafter
from treegraft.runtime.models import Model
from treegraft.runtime.ngram import NGramDrafter
from treegraft.runtime.packed import repack
from treegraft.runtime.sampling import Chooser, ScoreError, best
from treegraft.runtime.scheduler import Artifact, Mask, Schedule
from treegraft.runtime.size import Cut
from treegraft.runtime.tree import DraftTree, Paths
from treegraft.runtime.trial import check_branching


@dataclass
class Round:
    """What one round did. `tokens[k - 1]` are the nodes that step k's medium call processed, lag aside (0: no call).

    `ms` splits the wall time: target, medium, small, signals (with the decision), tree (verification size, caches)
    and rest.
    """

    position: int  # answer tokens before the root
    lag: int  # before the round, in tokens
    mask: int
    tokens: list[int]
    drafted: int
    kept: int
    accepted: int
    ms: dict[str, float]
    starts: list[int]  # the tree's nodes, root included, before each step
    signals: list[dict[str, Any]]  # what each decision read

    @property
    def medium_calls(self) -> int:
        return sum(count > 0 for count in self.tokens)


@dataclass(frozen=True)
class Drop:
    """Where the monitor gave up a schedule that made the text slower than one-token steps; times in ms a token."""

    position: int  # answer tokens before the first round that it changed
    schedule: str  # what the rounds from there on follow: small or autoregressive
    ms: float  # of the rounds before
    one_token_ms: float  # of the one-token steps that they were compared with


@dataclass
class Decoded:
    """An answer (token ids, end of sequence included) and how it came about. Times are in ms, prompt included.

    `uncertainty` holds the target's entropy and margin (see `uncertainty`) where it chose each token, if that was
    measured; else where it chose each round's last one, if the schedule reads it. `fallbacks` counts decisions that an
    artifact took by its fallback schedule. `drops` and `drift` are what the clock was watched for, where it was (see
    `runtime.monitor`). `seed` is the sampling noise's, None where greedy.
    """

    tokens: list[int]
    rounds: list[Round] = field(default_factory=list)
    uncertainty: list[tuple[float, float]] = field(default_factory=list)
    fallbacks: int = 0
    drops: list[Drop] = field(default_factory=list)
    drift: float | None = None  # measured T_tgt / T_mid over the artifact's
    first_token_ms: float = 0.0
    total_ms: float = 0.0
    seed: int | None = None


@dataclass
class Plan:
    """How to decode: a schedule, the shape of its trees, and the choice of verification size; depth 0 never drafts."""

    name: str
    schedule: Schedule | Artifact
    drafting: Drafting
    cut: Cut


class PromptCache:
    """Both models' caches, kept from one answer to the next: a later turn of a chat processes its new tokens only.

    Give the same one to `decode` turn after turn. It serves any prompt: what its text shares with the last one from the
    beginning on is kept, the rest is processed anew. The text is the target's own as without it, up to float ties.
    """

    def __init__(self, target: Model, medium: Model | None):
        self.models = (target, medium)
        self.verifier = TreeForward(target)
        self.drafter = None if medium is None else LMDrafter(medium, target.embeds)
        self.text: list[int] = []  # begins with what either model has processed

    def rewind(self, prompt: list[int]) -> None:
        """Keep what is in common with `prompt`, save its last token, which is the next root.

        The models may have been changed since the last text: weights, hooks, adapters. Raises ModelError for a target
        that cannot branch any more.
        """
        check_branching(self.models[0].name, self.models[0].lm)
        for model in self.models:
            if model is not None:
                repack(model.lm)
        shared = next((i for i, (a, b) in enumerate(zip(self.text, prompt)) if a != b), len(self.text))
        for forward in (self.verifier, self.drafter):
            if forward is not None:
                forward.rewind(min(shared, len(prompt) - 1))
        self.text = list(prompt)


AUTOREGRESSIVE = Plan("autoregressive", Mask(0), Drafting(depth=0), Cut("none"))


class ContextError(ValueError):
    """A prompt that does not fit the model's context, or is empty."""


def end_tokens(model: Model) -> set[int]:
    """The ids that end an answer, by the model's generation config."""
    ids = model.lm.generation_config.eos_token_id
    if isinstance(ids, torch.Tensor):
        ids = ids.tolist()
    return set(ids) if isinstance(ids, list | tuple | set) else {ids} - {None}


def check_prompt(model: Model, prompt: list[int], max_new_tokens: int, depth: int) -> None:
    """Raise ContextError where `prompt` is empty or the answer could leave the model's context."""
    if not prompt:
        raise ContextError("the prompt is empty; give at least one token")
    needed = len(prompt) + max_new_tokens + depth
    if needed > model.context:
        raise ContextError(
            f"{len(prompt)} prompt tokens + {max_new_tokens} new + {depth} drafted = {needed} exceed the context of "
            f"{model.name!r}, {model.context} tokens; shorten the prompt or lower --max-new-tokens"
        )


def decode(
    target: Model,
    medium: Model | None,
    prompt: list[int],
    plan: Plan,
    max_new_tokens: int,
    chooser: Chooser | None = None,
    on_tree: Callable[[DraftTree, list[int], list[int]], None] | None = None,
    measure: bool = False,
    cache: PromptCache | None = None,
) -> Decoded:
    """Decode one answer; the text is the target's own whatever the plan.

    Raises ContextError for a prompt that is empty or too long, ScoreError where the target's scores for a token are no
    numbers, ValueError for a `cache` made with other models than these; a cache keeps what the prompt shares with its
    last text. `on_tree` receives each round's draft tree with the kept and the accepted nodes; `measure` records the
    target's uncertainty at each token.
    """
    *_, decoded = decode_rounds(target, medium, prompt, plan, max_new_tokens, chooser, on_tree, measure, cache)
    return decoded


def decode_rounds(
    target: Model,
    medium: Model | None,
    prompt: list[int],
    plan: Plan,
    max_new_tokens: int,
    chooser: Chooser | None = None,
    on_tree: Callable[[DraftTree, list[int], list[int]], None] | None = None,
    measure: bool = False,
    cache: PromptCache | None = None,
    ends: Callable[[list[int]], bool] | None = None,
    steer: Callable[[Decoded], Plan] | None = None,
) -> Iterator[Decoded]:
    """As `decode`, round by round: yields the answer as far as it goes, the same object each time, after each forward.

    `ends(text)` says whether the answer ends with the last token of `text` (prompt included), and is asked once after
    every token; by default it ends with the model's end of sequence. `steer`, asked before every round but the
    prompt's, gives the round's plan in place of `plan`.
    """
    start = perf_counter()
    chooser = chooser or Chooser()
    drafting = plan.drafting
    check_prompt(target, prompt, max_new_tokens, drafting.depth)
    if medium is not None:
        check_prompt(medium, prompt, max_new_tokens, drafting.depth)
    ended = partial(_ended, len(prompt) + max_new_tokens, ends or partial(_ends_with, end_tokens(target)))
    cache = cache or PromptCache(target, medium)
    if cache.models[0] is not target or cache.models[1] is not medium:
        raise ValueError("the prompt cache was made with other models; make one with PromptCache(target, medium)")
    cache.rewind(prompt)
    verifier, drafter, text = cache.verifier, cache.drafter, cache.text
    small = NGramDrafter()
    if drafting.depth:
        small.extend(prompt)
    decoded = Decoded([], seed=chooser.seed)
    uncertain = measure or not set(signals.UNCERTAINTY).isdisjoint(plan.schedule.reads)
    while True:
        # The first round drafts nothing: it is the prompt's forward.
        first = len(text) == len(prompt)
        now = plan if first or steer is None else steer(decoded)
        clock = _Clock()
        committed, root = text[:-1], text[-1]
        paths = Paths(root, committed, small.longest)
        tree = DraftTree(token=[root])
        lag = 0 if drafter is None else drafter.lag(committed)
        mask, tokens, starts, read = 0, list[int](), list[int](), list[dict[str, Any]]()
        if not first:
            entropy, margin = decoded.uncertainty[-1] if uncertain else (0.0, 0.0)
            state = signals.State(
                tree,
                now.drafting.width,
                0,
                0,
                len(prompt),
                len(decoded.tokens) - 1,
                entropy,
                margin,
                match=partial(_match, small, paths, tree),
                planned=partial(_planned, tree, now.drafting),
                lag=lag,
                accepted=[done.accepted for done in decoded.rounds],
            )
            before = _fallbacks(now)
            mask, tokens, starts, read = draft(tree, paths, committed, small, drafter, now, state, clock)
            decoded.fallbacks += _fallbacks(now) - before
        order = tree.ordered(now.drafting.budget)
        kept = order[: now.cut.size([tree.log_s[node] for node in order], len(committed))]
        clock.lap("tree")
        logits = verifier(committed, paths, [0] + [tree.path[node] for node in kept])
        try:
            accepted, emitted, rows, done = accept(tree, kept, logits, chooser, text, ended)
        except ScoreError:
            if not kept:
                verifier.forget(0)  # of what it holds, nobody knows what is sound
                raise
            # A drafted token that overflows spoils all rows of its forward; what counts is the text's own tokens.
            kept = []
            verifier.forget(len(committed))
            logits = verifier(committed, paths, [0])
            accepted, emitted, rows, done = accept(tree, kept, logits, chooser, text, ended)
        clock.lap("target")  # reading the choices waits for the device
        if uncertain:
            decoded.uncertainty += [uncertainty(logits[row]) for row in (rows if measure else rows[-1:])]
        clock.lap("signals")
        path = [0] + [tree.path[node] for node in accepted]
        verifier.commit(path)
        if drafter is not None:
            drafter.commit(path)
        clock.lap("tree")
        if drafting.depth:
            small.extend(emitted)
        text += emitted
        decoded.tokens += emitted
        if on_tree and not first:
            on_tree(tree, kept, accepted)
        clock.lap("rest")
        if first:
            decoded.first_token_ms = (perf_counter() - start) * 1e3
        else:
            decoded.rounds.append(
                Round(len(decoded.tokens) - len(emitted) - 1, lag, mask, tokens, len(tree) - 1, len(kept),
                      len(accepted), clock.ms, starts, read)
            )  # fmt: skip
        decoded.total_ms = (perf_counter() - start) * 1e3
        yield decoded
        if done:
            return


def draft(
    tree: DraftTree,
    paths: Paths,
    committed: list[int],
    small: NGramDrafter,
    medium: LMDrafter | None,
    plan: Plan,
    state: signals.State,
    clock: "_Clock",
) -> tuple[int, list[int], list[int], list[dict[str, Any]]]:
    """Grow the tree by K steps, each with the drafter that the schedule names.

    Returns the mask of medium steps and, by step, the nodes processed, the tree's size before it, and the signals read.
    """
    drafting, schedule = plan.drafting, plan.schedule
    mask, tokens, starts, read = 0, list[int](), list[int](), list[dict[str, Any]]()
    for step in range(1, drafting.depth + 1):
        reading = signals.Reading(state, step, mask, 0 if any(tokens) else state.lag)
        invoke = drafting.may_call(mask) and schedule.decide(step, mask, reading)
        read.append(dict(reading))
        starts.append(len(tree))
        clock.lap("signals")
        if invoke:
            if medium is None:
                raise ValueError(f"schedule {plan.name!r} calls a medium drafter; give one with --medium")
            planned = plan_medium(tree, drafting)
            if planned:
                medium.process(committed, paths, [tree.path[node] for node in planned], drafting.children)
            medium_step(tree, paths, planned, medium, drafting)
            tokens.append(len(planned))
            mask |= 1 << (step - 1)
            clock.lap("medium")
        else:
            small_step(tree, paths, small, medium, drafting)
            tokens.append(0)
            clock.lap("small")
    return mask, tokens, starts, read


def accept(
    tree: DraftTree,
    kept: list[int],
    logits: torch.Tensor,
    chooser: Chooser,
    text: list[int],
    ended: Callable[[list[int]], bool],
) -> tuple[list[int], list[int], list[int], bool]:
    """Descend while the target's choice is a kept child; logits row 0 is the root's, row i that of kept[i - 1].

    Returns the accepted nodes, the tokens chosen (the nodes' and a bonus token), the rows that chose them, and whether
    the answer ended: nothing is chosen after its last token, so that it may be an accepted node's, without a bonus.
    Raises ScoreError where the root's scores are no numbers; a node whose are is not descended to.
    """
    row = {0: 0} | {node: i + 1 for i, node in enumerate(kept)}
    choices = best(logits).tolist() if chooser.plain else None
    text = text.copy()
    node, accepted, emitted, rows = 0, list[int](), list[int](), list[int]()
    while True:
        scores = logits[row[node]]
        try:
            if choices is None:
                token = chooser.choose(text, scores)
            else:
                token = chooser.checked(choices[row[node]], text, scores, scores)
        except ScoreError:
            if not accepted:
                raise
            return accepted[:-1], emitted, rows, False  # a node among others: it is asked again, as a root
        text.append(token)
        emitted.append(token)
        rows.append(row[node])
        done = ended(text)
        child = tree.find_child(node, token)
        if child is None or child not in row:
            return accepted, emitted, rows, done
        accepted.append(child)
        if done:
            return accepted, emitted, rows, done
        node = child


def _fallbacks(plan: Plan) -> int:
    return plan.schedule.fallbacks if isinstance(plan.schedule, Artifact) else 0


def _ended(length: int, ends: Callable[[list[int]], bool], text: list[int]) -> bool:
    return ends(text) or len(text) >= length


def _ends_with(tokens: set[int], text: list[int]) -> bool:
    return text[-1] in tokens


def uncertainty(logits: torch.Tensor) -> tuple[float, float]:
    """Entropy (nats) and gap (nats) between the two best tokens of a distribution, logits of shape (V,)."""
    log_p = torch.log_softmax(logits.float(), dim=-1)
    best = log_p.topk(2).values
    entropy, margin = torch.stack([-(log_p.exp() * log_p).nansum(), best[0] - best[1]]).tolist()
    return entropy, margin


def _match(small: NGramDrafter, paths: Paths, tree: DraftTree, node: int) -> tuple[int, int]:
    return small.match(paths, tree.path[node])


def _planned(tree: DraftTree, drafting: Drafting) -> int:
    return len(plan_medium(tree, drafting))


class _Clock:
    """Splits a round's wall time into named parts."""

    def __init__(self) -> None:
        self.ms = dict.fromkeys(("target", "medium", "small", "signals", "tree", "rest"), 0.0)
        self._last = static.seconds()

    def lap(self, part: str) -> None:
        now = static.seconds()
        self.ms[part] += (now - self._last) * 1e3
        self._last = now
