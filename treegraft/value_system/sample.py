"""A log larger than a fit needs: some of its prompts are fitted, the others judge what came of it, batch by batch.

So memory and the time of a fit have a bound, whatever the size of the log, and the verdict on a large log rests on
prompts that nothing was chosen by.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from treegraft.data.files import Location
from treegraft.data.log import read_answers
from treegraft.runtime.decode import AUTOREGRESSIVE, Plan
from treegraft.runtime.latency import LatencyProfile
from treegraft.value_system.replay import flatten, replay, summarise

FITTED = 1_000_000  # decision points: about 260 prompts of 128 tokens (K = 5)
BATCH = 250_000  # decision points in memory at a time while judging: about 60 MB

Part = dict[str, Any]  # of a manifest: one prompt


def divide(manifest: dict[str, Any], seed: int, most: int) -> tuple[list[Part], list[Part]]:
    """A random choice of prompts (two or more) to fit, of at most `most` decision points, and the prompts left over."""
    parts = manifest["parts"]
    order = np.random.default_rng(seed).permutation(len(parts))
    points = np.cumsum([parts[i]["decisions"]["rows"] for i in order])
    fitted = set(order[(points <= most) | (np.arange(len(order)) < 2)].tolist())  # a fit needs two
    return [p for i, p in enumerate(parts) if i in fitted], [p for i, p in enumerate(parts) if i not in fitted]


def batches(parts: Sequence[Part], most: int) -> Iterator[list[Part]]:
    """The parts in order, at most `most` decision points together (or one part)."""
    batch: list[Part] = []
    for part in parts:
        if batch and sum(p["decisions"]["rows"] for p in [*batch, part]) > most:
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch


def judge(
    folder: Location, manifest: dict[str, Any], parts: Sequence[Part], plans: Sequence[Plan], profile: LatencyProfile
) -> dict[str, Any]:
    """Replay plans, with autoregressive decoding, on parts of a log: `summarise`'s figures.

    Raises LogError for a part that is missing or was altered.
    """
    records = []
    for batch in batches(parts, BATCH):
        log = flatten(read_answers(folder, manifest, batch))
        for plan in (AUTOREGRESSIVE, *plans):
            records += replay(log, plan.schedule, plan.cut, profile, plan.drafting).records(plan.name)
    return summarise(records)
