"""What a schedule gains over what one could do by hand: the better endpoint, the best fixed mask, and up to the oracle.

Gains are fractions (0.15: 15 % more tokens per second), by benchmark, that is prompt file, and in all: "overall" is the
unweighted mean of the benchmarks', each against its own better endpoint (spec section 6).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from sklearn.model_selection import GroupKFold

from treegraft.data.log import Answer
from treegraft.runtime.decode import AUTOREGRESSIVE, Plan
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.latency import LatencyProfile
from treegraft.runtime.scheduler import Artifact, Mask, Schedule
from treegraft.runtime.size import Cut
from treegraft.value_system.replay import (
    DRAWS,
    Policy,
    Positions,
    best_mask,
    fixed_point,
    flatten,
    interval,
    oracle,
    replay,
    summarise,
)

Way = TypeVar("Way")
FOLDS = 4
MEASURES = ("gain_over_better_endpoint", "gain_over_best_fixed", "gain_over_best_fixed_hindsight", "oracle_gap_share")


@dataclass
class Fold:
    """A part of a log's prompts to learn from, and the others to judge by; `index` are the test answers among all."""

    train: Positions
    test: Positions
    index: np.ndarray


def prompt_groups(answers: Sequence[Answer]) -> np.ndarray:
    """The number of each answer's prompt, (answers,): turns of a conversation share it."""
    known: dict[tuple[str, str], int] = {}
    return np.array([known.setdefault((answer.file, answer.prompt), len(known)) for answer in answers])


def make_folds(answers: Sequence[Answer]) -> Iterator[Fold]:
    """FOLDS folds by prompt, or as many as there are prompts; at least two prompts are needed.

    One at a time, since each holds a copy of the log.
    """
    groups = prompt_groups(answers)
    splits = GroupKFold(min(FOLDS, int(groups.max()) + 1)).split(groups, groups=groups)
    return (make_fold(answers, test) for _, test in splits)


def make_fold(answers: Sequence[Answer], test: np.ndarray) -> Fold:
    """The fold whose test answers have the indices `test`."""
    held_out = set(test.tolist())
    return Fold(flatten([a for i, a in enumerate(answers) if i not in held_out]),
                flatten([answers[i] for i in test]), test)  # fmt: skip


def over_folds(folds: Sequence[Fold], ways: Sequence[Way], ms_of: Callable[[Fold, Way], np.ndarray]) -> np.ndarray:
    """Held-out times (answers,): `ms_of` gives those of a fold's test answers by that fold's own way."""
    ms = np.zeros(sum(len(fold.index) for fold in folds))
    for fold, way in zip(folds, ways):
        ms[fold.index] = ms_of(fold, way)
    return ms


def choose_by_others(
    answers: Sequence[Answer],
    folds: Sequence[Fold],
    ms: Mapping[Way, np.ndarray],
    choose: Callable[[Sequence[Answer], dict[Way, np.ndarray]], Way],
) -> list[Way]:
    """Each fold's choice among ways with held-out times `ms` (answers,), made on the other folds' answers alone.

    A choice made on all of them would flatter the way that was lucky on the prompts that it is judged by.
    """
    made = []
    for fold in folds:
        others = np.setdiff1d(np.arange(len(answers)), fold.index)
        made.append(choose([answers[i] for i in others], {way: times[others] for way, times in ms.items()}))
    return made


def fastest(_: Sequence[Answer], ms: Mapping[Way, np.ndarray]) -> Way:
    """The way of the least time in all, the first on ties."""
    return min(ms, key=lambda way: ms[way].sum())


def held_out_ms(
    fold: Fold, schedule: Schedule | Artifact | Policy, profile: LatencyProfile, drafting: Drafting
) -> np.ndarray:
    """Time (test answers,) of a schedule on a fold's test answers, its cut at the rho of the training ones."""
    rho, _ = fixed_point(fold.train, schedule, profile, drafting)
    return replay(fold.test, schedule, Cut("worth", rho, profile), profile, drafting).ms


@dataclass
class Rivals:
    """Time (ms, prompt included) of each answer, arrays (answers,), under what a schedule is measured against.

    Each has the cut that suits it best. `best_fixed` is one mask for all benchmarks, chosen on the training folds;
    `best_fixed_hindsight` is `mask`, the best on the very answers it is judged by. `oracle` is over masks and cuts,
    `oracle_masks` over masks alone, with the cut of `best_fixed_hindsight`.
    """

    small: np.ndarray
    medium: np.ndarray
    best_fixed: np.ndarray
    best_fixed_hindsight: np.ndarray
    oracle_masks: np.ndarray
    oracle: np.ndarray
    mask: int


def rivals(answers: Sequence[Answer], folds: Iterable[Fold], profile: LatencyProfile, drafting: Drafting) -> Rivals:
    """Replay the rivals of a log's answers, all but those in hindsight cross-validated over `folds`."""
    log = flatten(answers)
    times = {name: np.zeros(len(answers)) for name in ("small", "medium", "best_fixed")}
    for fold in folds:
        masks = 0, (1 << drafting.depth) - 1, best_mask(fold.train, profile, drafting)
        for ms, mask in zip(times.values(), masks):
            ms[fold.index] = held_out_ms(fold, Mask(mask), profile, drafting)
    mask = best_mask(log, profile, drafting)
    rho, hindsight = fixed_point(log, Mask(mask), profile, drafting)
    bound = oracle(log, Cut("worth", rho, profile), profile)
    prompt_ms = hindsight.ms - hindsight.decode_ms
    return Rivals(
        **times,
        best_fixed_hindsight=hindsight.ms,
        oracle_masks=prompt_ms + bound.masks_ms,
        oracle=prompt_ms + bound.cuts_ms,
        mask=mask,
    )


def gains(answers: Sequence[Answer], ms: np.ndarray, against: Rivals) -> dict[str, Any]:
    """{"overall", "by_file"} of MEASURES, each {"value", "interval"}, for a schedule that took `ms` (answers,).

    Intervals (95 %) are of a bootstrap over the prompts of each benchmark, the same draws for the schedule and its
    rivals; the better endpoint is that of the draw. oracle_gap_share is (schedule - best fixed) / (oracle - best
    fixed) in tokens per second, 0 where the oracle leaves no gap.
    """
    groups = prompt_groups(answers)
    columns = [ms, against.small, against.medium, against.best_fixed, against.best_fixed_hindsight, against.oracle]
    tokens = np.bincount(groups, [answer.length for answer in answers])
    sums = np.stack([tokens, *(np.bincount(groups, column) for column in columns)], axis=1)
    file_of = {int(group): answer.file for group, answer in zip(groups, answers)}
    by_file, values, draws = {}, [], []
    generator = np.random.default_rng(0)  # one for all: benchmarks are drawn apart, whatever their sizes
    for file in dict.fromkeys(file_of.values()):
        mine = sums[[group for group in file_of if file_of[group] == file]]
        index = generator.integers(0, len(mine), (DRAWS, len(mine)))
        values.append(_measure(mine.sum(axis=0)[None]))
        draws.append(_measure(mine[index].sum(axis=1)))
        by_file[file] = _figures(values[-1], draws[-1])
    return {"overall": _figures(np.mean(values, axis=0), np.mean(draws, axis=0)), "by_file": by_file}


def _measure(sums: np.ndarray) -> np.ndarray:
    """MEASURES (len(MEASURES), n) of sums (n, 7): tokens and the ms of the schedule and of each rival."""
    schedule, small, medium, fixed, hindsight, bound = (sums[:, 0] / sums[:, i] for i in range(1, 7))
    gap = bound - fixed
    share = np.divide(schedule - fixed, gap, out=np.zeros_like(gap), where=gap > 1e-9 * fixed)
    return np.stack([schedule / np.maximum(small, medium) - 1, schedule / fixed - 1, schedule / hindsight - 1, share])


def _figures(values: np.ndarray, draws: np.ndarray) -> dict[str, Any]:
    return {
        name: {"value": float(value), "interval": interval(drawn)}
        for name, value, drawn in zip(MEASURES, values[:, 0], draws)
    }


def evaluate(answers: Sequence[Answer], plans: Sequence[Plan], profile: LatencyProfile) -> dict[str, Any]:
    """Replay plans, with autoregressive decoding: `summarise`'s figures with `gains`, and under "rho" the rho to use.

    That is each schedule's fixed point, in tokens per ms: what its "worth" cut should weigh time by. A log of one
    prompt, from which nothing can be held out, gives no gains.
    """
    log = flatten(answers)
    records, rho, ms = [], {}, {}
    for plan in (AUTOREGRESSIVE, *(p for p in plans if p.name != AUTOREGRESSIVE.name)):
        run = replay(log, plan.schedule, plan.cut, profile, plan.drafting)
        records += run.records(plan.name)
        rho[plan.name] = fixed_point(log, plan.schedule, profile, plan.drafting)[0] if plan.drafting.depth else run.rho
        ms[plan.name] = run.ms
    result = summarise(records)
    drafting = next((plan.drafting for plan in plans if plan.drafting.depth), None)
    if drafting and prompt_groups(answers).max() > 0:
        against = rivals(answers, make_folds(answers), profile, drafting)
        for name, times in ms.items():
            found = gains(answers, times, against)
            result["overall"][name] |= found["overall"]
            for file, figures in found["by_file"].items():
                result["by_file"][file][name] |= figures
    return {**result, "rho": rho}
