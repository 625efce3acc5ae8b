"""Measure a latency profile on the machine that will decode (spec section 6)."""

import platform
import random
from dataclasses import replace
from itertools import pairwise
from statistics import mean, median
from time import perf_counter

import numpy as np
import torch

from treegraft.runtime.decode import Decoded, Plan, decode
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.forward import TreeForward
from treegraft.runtime.latency import Curve, LatencyProfile, fit_curve
from treegraft.runtime.model import Model
from treegraft.runtime.scheduler import Mask, Rule, Rules, Schedule
from treegraft.runtime.signals import UNCERTAINTY
from treegraft.runtime.size import Cut
from treegraft.runtime.tree import Paths

CONTEXTS = (32, 256, 768)  # tokens in the cache before a forward
SIZES = (1, 2, 4, 8, 16, 24, 32, 64)  # nodes in a forward
PROMPTS = (64, 256, 768)  # tokens processed at once on an empty cache
REPEATS = 5
# Signals on a learned tree's way to a decision, by step: 1.6 on average besides step, mask and lag, which cost nothing.
TYPICAL = (
    ("root_recency", "frontier_score_p90"), ("match_p90", "pre_reselect_score"), ("expected_accepted", "medium_calls"),
    ("match_mean",), ("frontier_score_p90",),
)  # fmt: skip


def measure_profile(target: Model, medium: Model, prompt: list[int], drafting: Drafting) -> LatencyProfile:
    """Time both models over tokens and contexts, interleaved, and fit their curves to the medians.

    `prompt` is decoded with either drafter to time what a step and a round cost outside the forwards, and by rules that
    read signals, to time their decisions.
    """
    target_curve, medium_curve, first_ms = _curves(target, medium)
    schedules: list[Schedule] = [
        Mask(0), Mask((1 << drafting.depth) - 1), _reading(drafting.depth), _reading(drafting.depth, UNCERTAINTY),
    ]  # fmt: skip
    small, called, deciding, uncertain = (
        decode(target, medium, prompt, Plan("measured", schedule, drafting, Cut("score", log_s=-2.5)), 32)
        for schedule in schedules
    )
    steps = max(1, drafting.depth)
    rounds_ms = [
        mean(r.ms["signals"] for r in decoded.rounds) if decoded.rounds else 0.0
        for decoded in (small, deciding, uncertain)
    ]
    profile = LatencyProfile(
        target_curve,
        medium_curve,
        medium_first_ms=first_ms,
        decision_ms=round(max(0.0, rounds_ms[1] - rounds_ms[0]) / steps, 4),
        uncertainty_ms=round(max(0.0, rounds_ms[2] - rounds_ms[1]), 4),
        small_step_ms=round(mean(r.ms["small"] / steps for r in small.rounds), 4) if small.rounds else 0.0,
        round_ms=round(median([r.ms["tree"] + r.ms["rest"] for r in small.rounds]), 4) if small.rounds else 0.0,
        machine=f"{platform.machine()}, {target.device.type}, {torch.get_num_threads()} threads, target "
        f"{target.lm.dtype}, medium {medium.lm.dtype}",
    )
    return replace(profile, medium_step_ms=_medium_step_ms(called, profile, len(prompt)))


def _reading(depth: int, also: tuple[str, ...] = ()) -> Rules:
    """Rules that read TYPICAL signals before every step and call at the first, as most rounds that call do."""
    rules = []
    for step in range(1, depth + 1):
        names = TYPICAL[(step - 1) % len(TYPICAL)] + (also if step == 1 else ())
        read = [(name, ">", -1e9) for name in names]
        rules.append(Rule(step, (*read, ("step", "<=", 1.0))))
    return Rules(tuple(rules), tuple({name: None for rule in rules for name, _, _ in rule.conditions}))


def call_ms(model: Model, nodes: int = 4, context: int = 256) -> float:
    """The median time of a forward over `nodes` nodes after `context` tokens, in ms."""
    runner = _Runner(model, context)
    runner.run(nodes)
    return median(runner.run(nodes) for _ in range(9))


def _medium_step_ms(decoded: Decoded, profile: LatencyProfile, prompt_length: int) -> float:
    """The part of a medium step that is not its forward.

    It is a small difference of large times, and the machine may have changed its pace since the curves were measured:
    each round's times are taken at the pace of its own target forward.
    """
    rests = []
    for done in decoded.rounds:
        context = prompt_length + done.position
        pace = done.ms["target"] / float(profile.target(done.kept + 1, context))
        calls = profile.calls_ms(done.tokens, done.lag, context)
        rests.append((done.ms["medium"] / pace - calls) / max(1, len(done.tokens)))
    return round(max(0.0, median(rests)), 4) if rests else 0.0


def _curves(target: Model, medium: Model) -> tuple[Curve, Curve, float]:
    """Both models' fitted curves, and what a round's first medium call takes more than a later one, in ms.

    All sizes and contexts run in one shuffled order, each between two one-token forwards of the target: they give the
    machine's pace, which may change while it is measured, and leave the medium drafter's weights as cold as a round
    finds them. A later call is the same one again.
    """
    jobs = []
    least = CONTEXTS[0] + max(SIZES)
    for i, model in enumerate((target, medium)):
        if model.context < least:
            raise ValueError(
                f"{model.name}: its context of {model.context} tokens is too short to be measured, which takes {least}"
            )
        room = model.context - max(SIZES)
        jobs += [(i, context, size) for context in CONTEXTS if context <= room for size in SIZES]
        jobs += [(i, 0, size) for size in PROMPTS if size <= room]
    shuffled = jobs * REPEATS
    random.Random(0).shuffle(shuffled)
    runners = {(i, context): _Runner((target, medium)[i], context) for i, context, _ in jobs}
    for i, context, size in jobs:  # warm up every shape once
        runners[i, context].run(size)
    one_token = runners[0, CONTEXTS[0]]
    between, runs = [one_token.run(1)], []
    for i, context, size in shuffled:
        runs.append([runners[i, context].run(size) for _ in range(1 + i)])
        between.append(one_token.run(1))
    times: dict[tuple[int, int, int], list[float]] = {job: [] for job in jobs}
    extra = []
    usual = median(between)
    for (i, context, size), ms, pace in zip(shuffled, runs, map(mean, pairwise(between)), strict=True):
        steady = usual / pace
        times[i, context, size].append(ms[-1] * steady)
        if i and context:
            extra.append((ms[0] - ms[-1]) * steady)
    curves = []
    for i in range(2):
        mine = [(size, context, median(ms)) for (which, context, size), ms in times.items() if which == i]
        curves.append(fit_curve(*np.array(mine, dtype=np.float64).T))
    return curves[0], curves[1], round(max(0.0, median(extra)), 4)


class _Runner:
    """Forwards of any size over a cache of `context` tokens, which they leave as it was."""

    def __init__(self, model: Model, context: int):
        vocabulary = model.embeds
        self.tokens = random.Random(context).choices(range(vocabulary), k=max(context, max(PROMPTS)) + 1)
        self.context = context
        self.forward = TreeForward(model)
        if context:
            self.forward(self.tokens[: context - 1], Paths(self.tokens[context - 1], [], 1), [0])
            self.forward.commit([0])

    def run(self, size: int) -> float:
        """ms of a forward over `size` nodes (or, on an empty cache, prompt tokens)."""
        forward = self.forward
        committed = self.tokens[: self.context] if self.context else self.tokens[: size - 1]
        paths = Paths(self.tokens[-1], [], 1)
        count = size if self.context else 1
        nodes = [0, *(paths.child(0, token) for token in sorted(set(self.tokens))[: count - 1])]
        start = perf_counter()
        forward(committed, paths, nodes)[-1, -1].item()  # waits for the device
        ms = (perf_counter() - start) * 1e3
        forward.rewind(self.context)
        return ms
