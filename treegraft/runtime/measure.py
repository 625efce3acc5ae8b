"""Measure a latency profile on the machine that will decode (spec section 6)."""

import platform
import random
from statistics import mean, median
from time import perf_counter

import numpy as np
import torch

from treegraft.runtime.decode import Decoded, Plan, decode
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.forward import TreeForward
from treegraft.runtime.latency import Curve, LatencyProfile, fit_curve
from treegraft.runtime.models import Model
from treegraft.runtime.scheduler import Mask
from treegraft.runtime.size import Cut
from treegraft.runtime.tree import Paths

CONTEXTS = (32, 256, 768)  # tokens in the cache before a forward
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # nodes in a forward
PROMPTS = (64, 256, 768)  # tokens processed at once on an empty cache
REPEATS = 3


def measure_profile(target: Model, medium: Model, prompt: list[int], drafting: Drafting) -> LatencyProfile:
    """Time both models over tokens and contexts, interleaved, and fit their curves to the medians.

    `prompt` is decoded with either drafter to time what a step and a round cost outside the forwards.
    """
    curves = dict(zip(("target", "medium"), _curves([target, medium])))
    decoded = {}
    for name, bits in (("small", 0), ("medium", (1 << drafting.depth) - 1)):
        plan = Plan(name, Mask(bits), drafting, Cut("score", log_s=-2.5))
        decoded[name] = decode(target, medium, prompt, plan, max_new_tokens=32)
    small, called = decoded["small"], decoded["medium"]
    steps = max(1, drafting.depth)
    return LatencyProfile(
        **curves,
        small_step_ms=round(mean(r.ms["small"] / steps for r in small.rounds), 4) if small.rounds else 0.0,
        medium_step_ms=_medium_step_ms(called, curves["target"], curves["medium"], len(prompt), steps),
        round_ms=round(median([r.ms["tree"] + r.ms["rest"] for r in small.rounds]), 4) if small.rounds else 0.0,
        machine=f"{platform.machine()}, {target.device.type}, {torch.get_num_threads()} threads, {target.lm.dtype}",
    )


def call_ms(model: Model, nodes: int = 4, context: int = 256) -> float:
    """The median time of a forward over `nodes` nodes after `context` tokens, in ms."""
    runner = _Runner(model, context)
    runner.run(nodes)
    return median(runner.run(nodes) for _ in range(9))


def _medium_step_ms(decoded: Decoded, target: Curve, medium: Curve, prompt_length: int, steps: int) -> float:
    """The part of a medium step that is not its forward.

    It is a small difference of large times, and the machine may have changed its pace since the curves were measured:
    each round's times are taken at the pace of its own target forward.
    """
    rests = []
    for done in decoded.rounds:
        context, lag, forwards = prompt_length + done.position, done.lag, 0.0
        for tokens in done.tokens:
            forwards += float(medium(tokens + lag, context)) if tokens else 0.0
            lag = 0 if tokens else lag
        pace = done.ms["target"] / float(target(done.kept + 1, context))
        rests.append((done.ms["medium"] / pace - forwards) / steps)
    return round(max(0.0, median(rests)), 4) if rests else 0.0


def _curves(models: list[Model]) -> list[Curve]:
    """A fitted curve for each model; measurements of all models and sizes run in one shuffled order."""
    jobs = []
    for i, model in enumerate(models):
        room = model.context - max(SIZES)
        jobs += [(i, context, size) for context in CONTEXTS if context <= room for size in SIZES]
        jobs += [(i, 0, size) for size in PROMPTS if size <= room]
    shuffled = jobs * REPEATS
    random.Random(0).shuffle(shuffled)
    runners = {(i, context): _Runner(models[i], context) for i, context, _ in jobs}
    for i, context, size in jobs:  # warm up every shape once
        runners[i, context].run(size)
    times: dict[tuple[int, int, int], list[float]] = {job: [] for job in jobs}
    for i, context, size in shuffled:
        times[i, context, size].append(runners[i, context].run(size))
    curves = []
    for i in range(len(models)):
        mine = [(size, context, median(ms)) for (which, context, size), ms in times.items() if which == i]
        curves.append(fit_curve(*np.array(mine, dtype=np.float64).T))
    return curves


class _Runner:
    """Forwards of any size over a cache of `context` tokens, which they leave as it was."""

    def __init__(self, model: Model, context: int):
        vocabulary = model.lm.config.vocab_size
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
