"""Stand-ins for positions that a log leaves out, so that replaying it estimates what an exact replay would say."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treegraft.data.log import Answer, LogError

FACTS = ("signals", "log_s", "ranks", "q", "tokens", "possible")
NEIGHBOURS = 4  # two on each side: the nearest alone would be met again and again where it holds a round up


def stand_in(answers: Sequence[Answer]) -> list[Answer]:
    """The answers with every position: one not logged has the facts of one near it that was, drawn by a fixed seed.

    For logs collected with --positions other than every:1. Answers of which no position was logged are left out;
    raises LogError where that leaves none.
    """
    logged = [answer for answer in answers if len(answer.positions) or answer.length < 2]
    if not logged:
        raise LogError("no position of any answer is logged; collect with a larger --positions sample")
    return [_filled(answer, np.random.default_rng(seed)) for seed, answer in enumerate(logged)]


def _filled(answer: Answer, generator: np.random.Generator) -> Answer:
    every, logged = np.arange(answer.length - 1), answer.positions
    if not len(logged):
        return answer  # one token, no position
    after = np.searchsorted(logged, every)
    count = min(NEIGHBOURS, len(logged))
    drawn = np.clip(after - count // 2, 0, len(logged) - count) + generator.integers(0, count, len(every))
    own = np.isin(every, logged)
    source = np.where(own, after, drawn)
    return replace(answer, positions=every, **{name: getattr(answer, name)[source] for name in FACTS})
