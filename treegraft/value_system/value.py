"""The value model: what calling the medium drafter is worth at every decision (spec section 6).

Worth is counted in tokens: emitted tokens - rho * time + h(the lag left behind) + h(the position landed on). Both
children of every decision are in the log, so the model fits their difference, the margin, by backward induction from
step K to 1; each step's decisions are the model's own. Decisions change rho, the lags and what follows a landing, so
fitting and replaying take turns.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
from sklearn.base import BaseEstimator
from threadpoolctl import threadpool_limits

from treegraft.data.files import Location, location
from treegraft.data.log import MANIFEST, Answer, LogError, read_answers, read_manifest
from treegraft.runtime.decode import AUTOREGRESSIVE
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.latency import LatencyProfile
from treegraft.runtime.scheduler import Mask
from treegraft.runtime.signals import LOGGED, RELEASE, UNCERTAINTY
from treegraft.runtime.size import Cut
from treegraft.value_system.gains import (
    Fold,
    Rivals,
    choose_by_others,
    fastest,
    gains,
    make_fold,
    make_folds,
    over_folds,
    prompt_groups,
    rivals,
)
from treegraft.value_system.replay import (
    NAMES,
    TRAJECTORY,
    Leaves,
    Positions,
    Replay,
    all_leaves,
    best_mask,
    fixed_point,
    flatten,
    interval,
    lag_ms,
    next_lag,
    node,
    replay,
    speedup_draws,
    trajectory,
)
from treegraft.value_system.report import write_report
from treegraft.value_system.sample import FITTED, Part, divide

VERSION = 3
KINDS = ("lightgbm", "linear")
TURNS = 3  # of fitting and replaying
VALUE_MODEL = "value model"
SIZES = (1, 2, 4, 8, 12)  # numbers of signals that the selection tries besides all, CONTEXT aside
CONTEXT = ("step", "medium_calls", "mask")  # read by every model: they are free, and need not be selected
INSIDE = 0.2  # weight of a position where the replay started no round; where it did, 1
ROWS = 200_000  # at most this many states are fitted a step
TREES = {
    "objective": "regression", "num_leaves": 6, "learning_rate": 0.08, "lambda_l2": 5.0, "feature_fraction": 0.7,
    "max_bin": 63, "num_threads": 1, "deterministic": True, "force_row_wise": True, "verbosity": -1,
}  # fmt: skip
MOST_TREES = 150  # a step
LEAST = 20  # positions in a leaf


@dataclass
class States:
    """The trajectory state at every position, also those where the replay started no round.

    At a position inside a round it is the state had that round stopped there. `lag` (R,) in tokens, `values`
    (R, trajectory signals), `weight` (R,) of the position in a fit; `later` (R,) is 1 where a later round of the answer
    calls, else 0.
    """

    lag: np.ndarray
    values: np.ndarray
    weight: np.ndarray
    later: np.ndarray


def states_of(log: Positions, run: Replay) -> States:
    """The trajectory states that a replay of `log` leads to.

    Rounds start less often where text is easy, so positions where one started weigh more in a fit. Those with less
    than K + 1 tokens to come weigh nothing: what a call gains there is cut off by the end of the answer, often just the
    limit on tokens in collection, and no signal may learn to foresee that.
    """
    weight = np.full(len(log.position), INSIDE)
    lags = np.zeros(len(log.position), dtype=int)
    values = np.zeros((len(log.position), len(TRAJECTORY)))
    later = np.zeros(len(log.position))
    called = np.asarray(run.trace["tokens"].any(axis=1))
    for index, first in enumerate(log.first):
        mine = np.flatnonzero(run.trace["answer"] == index)
        calls = called[mine].tolist()
        last_call = max((i for i, call in enumerate(calls) if call), default=-1)
        recent = np.zeros((1, 4), dtype=int)
        rounds = zip(*(run.trace[name][mine].tolist() for name in ("position", "lag", "accepted", "q")), calls)
        for done, (position, lag, accepted, q, call) in enumerate(rounds):
            row = first + position
            # Where the round started, and where it would have stopped after 0, 1, ... accepted tokens.
            stops = np.arange(min(accepted, log.remaining[row] - 1))
            inside = next_lag(lag, stops, q, call)
            here = slice(row, row + len(stops) + 1)
            past = np.column_stack([stops, np.repeat(recent[:, :-1], len(stops), axis=0)])
            lags[here] = np.concatenate([[lag], inside])
            values[here] = trajectory(
                lags[here], np.concatenate([recent, past]), np.append(done, np.full(len(stops), done + 1))
            )
            later[here] = done < last_call
            weight[row] = 1.0
            recent = np.column_stack([accepted, recent[:, :-1]])
    return States(lags, values, weight * (log.remaining > log.depth), later)


def leaf_worth(
    log: Positions, leaves: Leaves, states: States, masks: np.ndarray, rho: float, profile: LatencyProfile
) -> np.ndarray:
    """Worth in tokens of every leaf (R, M), later rounds following `masks` (R,); NaN where the log has none."""
    context, lag = log.context[:, None], states.lag[:, None]
    ms = leaves.ms + lag_ms(profile, lag, leaves.first, context)
    left = next_lag(lag, leaves.accepted, log.q, leaves.first > 0)
    # A later call will pay for the lag that is left, if one comes before the answer ends.
    landing = leaves.accepted + 1
    ends = log.remaining[:, None] <= landing
    debt = np.where(ends, 0.0, lag_ms(profile, left, 1, context))
    rows = np.arange(len(log.position))[:, None]
    after = np.where(ends, 0.0, onward(log, leaves, masks, rho)[np.where(ends, 0, rows + landing)])
    return np.where(log.possible, leaves.emitted - rho * (ms + states.later[:, None] * debt) + after, np.nan)


def onward(log: Positions, leaves: Leaves, masks: np.ndarray, rho: float) -> np.ndarray:
    """What each position is worth (R,), in tokens: those to come - rho * their time, under `masks` (R,), lag aside.

    Some positions are good ones to land on, such as the start of a passage that the small drafter can copy.
    """
    rows = np.arange(len(masks))
    emitted, ms, accepted = (part[rows, masks] for part in (leaves.emitted, leaves.ms, leaves.accepted))
    last = (log.remaining <= accepted + 1).tolist()
    following = (rows + accepted + 1).tolist()
    worth = (emitted - rho * ms).tolist()
    for row in reversed(range(len(worth))):
        if not last[row]:
            worth[row] += worth[following[row]]
    return np.array(worth)


def features(log: Positions, states: States, step: int) -> np.ndarray:
    """All signals (R * 2^(step - 1), len(NAMES)) before a step; row r * 2^(step - 1) + mask."""
    masks = np.arange(1 << (step - 1))
    rows = np.repeat(np.arange(len(log.position)), len(masks))
    return features_at(log, states, step, rows, np.tile(masks, len(log.position)))


def features_at(log: Positions, states: States, step: int, rows: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """All signals (n, len(NAMES)) before a step at some positions `rows` (n,) after the decisions `masks` (n,)."""
    values = np.concatenate([log.signals[rows, node(step, masks)], states.values[rows]], axis=1)
    called = log.tokens[rows, masks, : step - 1].any(axis=1)
    values[called, NAMES.index("lag")] = 0.0  # as a live round reads it after its first call
    return values


def backward(log: Positions, worth: np.ndarray, decide: Callable[[int, np.ndarray], np.ndarray]) -> list[np.ndarray]:
    """The margins of steps 1..K, each (R, 2^(step - 1)), from leaf worths (R, M); NaN where no call is possible.

    `decide(step, margin)` gives the decisions (bool, as margin) that the value of earlier steps counts on.
    """
    margins: list[np.ndarray] = []
    value = worth
    for step in range(log.depth, 0, -1):
        half = 1 << (step - 1)  # masks with bit step - 1 set are those from `half` on
        skip, invoke = value[:, :half], value[:, half:]
        margins.insert(0, invoke - skip)
        value = np.where(decide(step, margins[0]) & ~np.isnan(invoke), invoke, skip)
    return margins


def path(decisions: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The mask (R,) that each position has before steps 1..K + 1, from the decisions (R, 2^(step - 1)) of all nodes."""
    masks = [np.zeros(len(decisions[0]), dtype=int)]
    for step, decision in enumerate(decisions, start=1):
        masks.append(masks[-1] | decision[np.arange(len(decision)), masks[-1]].astype(int) << (step - 1))
    return masks


@dataclass
class Linear:
    """Ridge regression, for comparison with the trees."""

    coef: np.ndarray
    intercept: float
    spread: np.ndarray  # standard deviation of each signal

    @classmethod
    def fit(cls, x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> "Linear":
        """Weights are of mean 1."""
        mean, target = np.average(x, axis=0, weights=weight), np.average(y, weights=weight)
        spread = np.sqrt(np.average((x - mean) ** 2, axis=0, weights=weight))
        safe = np.where(spread > 0, spread, 1.0)
        scaled = (x - mean) / safe
        with threadpool_limits(1):  # the last bits of a sum depend on the number of threads
            gram = (scaled * weight[:, None]).T @ scaled + 0.01 * len(x) * np.eye(x.shape[1])
            coef = np.linalg.solve(gram, (scaled * weight[:, None]).T @ (y - target)) / safe
        return cls(coef, float(target - (coef * mean).sum()), spread)

    def predict(self, x: np.ndarray) -> np.ndarray:
        return (x * self.coef).sum(axis=1) + self.intercept

    def to_json(self) -> str:
        return json.dumps({"coef": self.coef.tolist(), "intercept": self.intercept, "spread": self.spread.tolist()})

    @classmethod
    def from_json(cls, text: str) -> "Linear":
        data = json.loads(text)
        return cls(np.array(data["coef"]), data["intercept"], np.array(data["spread"]))


class ValueModel(BaseEstimator):
    """Margins of calling over skipping, in tokens, by step; it is also the policy that calls where they are positive.

    kind "lightgbm" or "linear" (ridge regression, as a check); signals: the names to read (default: all).
    After `fit`: `models_` by step, `rho_` (tokens per ms) and `states_` of its replay on the training answers.
    """

    models_: dict[int, Any]
    rho_: float
    states_: States

    def __init__(self, kind: str = "lightgbm", seed: int = 0, signals: Sequence[str] | None = None):
        self.kind = kind
        self.seed = seed
        self.signals = signals

    def fit(
        self,
        answers: Sequence[Answer] | Positions,
        profile: LatencyProfile,
        drafting: Drafting,
        start: "ValueModel | None" = None,
    ) -> "ValueModel":
        """Fit to a log; `start`, a model fitted to the same log, saves all turns but one."""
        if self.kind not in KINDS:
            raise ValueError(f"--model {self.kind!r}: give one of {', '.join(KINDS)}")
        log = flatten(answers)
        if start is None:
            mask = best_mask(log, profile, drafting)
            rho, run = fixed_point(log, Mask(mask), profile, drafting)
            states, masks = states_of(log, run), np.full(len(log.position), mask)
        else:
            rho, states, masks = start.rho_, start.states_, start.masks(log, start.states_)
        deciding = profile.deciding(self, drafting.depth)
        for _ in range(TURNS if start is None else 1):
            leaves = all_leaves(log, Cut("worth", rho, profile), deciding)
            worth = leaf_worth(log, leaves, states, masks, rho, profile)
            self.models_ = {}
            backward(log, worth, partial(self._fit_step, log, states))
            rho, run = fixed_point(log, self, profile, drafting, rho)
            states = states_of(log, run)
            masks = self.masks(log, states)
        self.rho_, self.states_ = rho, states
        return self

    def importance(self) -> dict[str, list[float]]:
        """Each signal's part in the margins by step: total gain of its splits, or |weight| * spread if linear."""
        by_step = []
        for _, model in sorted(self.models_.items()):
            gain = np.abs(model.coef) * model.spread if isinstance(model, Linear) else model.feature_importance("gain")
            by_step.append(gain / (gain.sum() or 1.0))
        return {name: [float(step[i]) for step in by_step] for i, name in enumerate(self.reads)}

    def ranking(self) -> list[str]:
        """Signals by their importance over all steps, greatest first, CONTEXT left out."""
        total = {name: sum(by_step) for name, by_step in self.importance().items() if name not in CONTEXT}
        return sorted(total, key=lambda name: -total[name])

    @property
    def reads(self) -> list[str]:
        return list(NAMES if self.signals is None else self.signals)

    @property
    def _columns(self) -> list[int]:
        return [NAMES.index(name) for name in self.reads]

    def predict(self, step: int, values: np.ndarray) -> np.ndarray:
        """Margins (n,) before a step, from all signals (n, len(NAMES))."""
        if step not in self.models_:  # no call was possible there
            return np.full(len(values), -np.inf)
        return self.models_[step].predict(values[:, self._columns])

    def asks(self, step: int) -> bool:
        """Whether decisions at `step` have to work out signals."""
        return True

    def decide_many(self, step: int, masks: np.ndarray, values: np.ndarray) -> np.ndarray:
        return self.predict(step, values) > 0

    def margins(self, log: Positions, states: States) -> list[np.ndarray]:
        """The predicted margins of steps 1..K, each (R, 2^(step - 1)); -inf where the log has no call."""
        made = []
        for step in range(1, log.depth + 1):
            half = 1 << (step - 1)
            predicted = self.predict(step, features(log, states, step)).reshape(-1, half)
            made.append(np.where(log.possible[:, half : 2 * half], predicted, -np.inf))
        return made

    def masks(self, log: Positions, states: States) -> np.ndarray:
        """The mask (R,) that the model decides on at each position."""
        rows = np.arange(len(log.position))
        masks = np.zeros(len(rows), dtype=int)
        for step in range(1, log.depth + 1):
            call = masks | 1 << (step - 1)
            invoke = self.decide_many(step, masks, features_at(log, states, step, rows, masks))
            masks = np.where(invoke & log.possible[rows, call], call, masks)
        return masks

    def _fit_step(self, log: Positions, states: States, step: int, margin: np.ndarray) -> np.ndarray:
        """Fit one step's model; returns its decisions, shaped as `margin`."""
        weight = np.where(np.isnan(margin), 0.0, states.weight[:, None]).ravel()
        rows = np.flatnonzero(weight)
        if not len(rows):
            return np.zeros(margin.shape, dtype=bool)
        if len(rows) > ROWS:
            rows = np.sort(np.random.default_rng(self.seed).choice(rows, ROWS, replace=False))
        values = features(log, states, step)
        x, y, weight = values[rows][:, self._columns], margin.ravel()[rows], weight[rows] / weight[rows].mean()
        if self.kind == "lightgbm":
            # The nodes of a position share its luck, so a leaf needs positions, not nodes.
            least = max(1, min(LEAST, len(margin) // 10)) * margin.shape[1]
            settings = {**TREES, "min_data_in_leaf": least, "seed": self.seed}
            data = lightgbm.Dataset(x, y, weight=weight, feature_name=self.reads, params={"max_bin": TREES["max_bin"]})
            # What a log can teach grows with its positions: few trees on a small one, which is mostly noise.
            self.models_[step] = lightgbm.train(settings, data, min(MOST_TREES, max(10, math.isqrt(len(margin)))))
        else:
            self.models_[step] = Linear.fit(x, y, weight)
        return (self.predict(step, values) > 0).reshape(margin.shape)

    def save(self, folder: Path) -> list[Path]:
        """One file a step, LightGBM's text or JSON if linear; returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for step, model in sorted(self.models_.items()):
            paths.append(folder / f"step-{step}.txt")
            paths[-1].write_text(model.to_json() if isinstance(model, Linear) else model.model_to_string())
        return paths

    @classmethod
    def load(cls, folder: Path, kind: str, signals: Sequence[str], rho: float, depth: int) -> "ValueModel":
        model = cls(kind, signals=signals)
        model.rho_ = rho
        model.models_ = {}
        for step in range(1, depth + 1):
            path = folder / f"step-{step}.txt"
            if path.exists():  # else no call was possible at that step
                text = path.read_text()
                model.models_[step] = Linear.from_json(text) if kind == "linear" else lightgbm.Booster(model_str=text)
        return model


class FitError(ValueError):
    """A value folder or log that cannot serve; the message names it and says what to do."""


def fit_value(
    log_folder: Location, profile: LatencyProfile, out_folder: Path, kind: str = "lightgbm", seed: int = 0
) -> dict[str, Any]:
    """Fit, select signals and cross-validate; writes the value folder and returns what its value.json says.

    Raises LogError for a log that cannot be read and FitError for one of a single prompt.
    """
    if out_folder.exists() and not out_folder.is_dir():
        raise FitError(f"--out {out_folder} is a file; give a folder")
    manifest = read_manifest(log_folder)
    if manifest["signals"] != LOGGED:
        raise LogError(f"{log_folder}: was collected with other signals than this treegraft has; collect again")
    fitted, left = divide(manifest, seed, FITTED)
    answers = read_answers(log_folder, manifest, fitted)
    drafting = Drafting(**manifest["drafting"])
    groups = prompt_groups(answers)
    if groups.max() < 1:
        raise FitError(
            f"{log_folder}: holds one prompt; cross-validation by prompt needs at least two, so collect more"
        )
    if all(answer.length <= drafting.depth + 2 for answer in answers):
        raise FitError(
            f"{log_folder}: no answer is longer than {drafting.depth + 2} tokens, so none shows what {drafting.depth} "
            "steps of drafting gain; collect with a greater --max-new-tokens"
        )
    folds = list(make_folds(answers))

    def tested(models: list[ValueModel]) -> np.ndarray:
        return over_folds(folds, models, lambda fold, model: _test(fold, model, profile, drafting))

    full = [ValueModel(kind, seed).fit(fold.train, profile, drafting) for fold in folds]
    candidates = NAMES
    if profile.uncertainty_ms:
        # The target's uncertainty costs time that no other signal does: it competes only where it earns that.
        certain = [name for name in NAMES if name not in UNCERTAINTY]
        without = [_narrowed(model, certain, fold.train, profile, drafting) for model, fold in zip(full, folds)]
        by_uncertainty = {False: tested(without), True: tested(full)}
        earned = choose_by_others(answers, folds, by_uncertainty, fastest)
        full = [model if earns else own for model, own, earns in zip(full, without, earned)]
        candidates = NAMES if fastest(answers, by_uncertainty) else certain
    sizes = [*SIZES, len(NAMES) - len(CONTEXT)]
    models = {size: [_smaller(model, size, fold.train, profile, drafting) for model, fold in zip(full, folds)]
              for size in sizes}  # fmt: skip
    ms = {size: tested(own) for size, own in models.items()}
    size, selection = _select(answers, ms)
    of_folds = choose_by_others(answers, folds, ms, lambda others, theirs: _select(others, theirs)[0])
    chosen = [models[own][i] for i, own in enumerate(of_folds)]
    held_out = tested(chosen)

    # The six signals of the paper's release, as a check on what was selected.
    of_release = tested([_narrowed(model, [*CONTEXT, *RELEASE], fold.train, profile, drafting)
                         for model, fold in zip(full, folds)])  # fmt: skip
    against = rivals(answers, folds, profile, drafting)

    everything = flatten(answers)
    all_signals = ValueModel(kind, seed).fit(everything, profile, drafting)
    widest = all_signals if candidates is NAMES else _narrowed(all_signals, candidates, everything, profile, drafting)
    model = _smaller(widest, size, everything, profile, drafting)
    report = {
        "version": VERSION,
        "kind": kind,
        "seed": seed,
        "log": {
            "folder": str(log_folder.resolve()),
            "manifest": _hash(log_folder),
            "fitted_prompts": len(fitted),
            "left_prompts": len(left),
        },
        "drafting": drafting.as_dict(),
        "rho": model.rho_,
        "signals": model.reads,
        "selection": [{**row, "signals": min(row["signals"], len(candidates) - len(CONTEXT))} for row in selection],
        "release": gain(answers, of_release, held_out),
        "cross_validated": _cross_validated(answers, held_out, against, profile),
        "calibration": _calibration(folds, chosen, profile, drafting),
        "score_calibration": score_calibration(everything),
        **_rounds(folds, chosen, profile, drafting),
        "importance": all_signals.importance(),
        "folds": [
            {"test": fold.index.tolist(), "rho": own.rho_, "signals": own.reads} for fold, own in zip(folds, chosen)
        ],
    }
    out_folder.mkdir(parents=True, exist_ok=True)
    saved = [path for name, own in (("all", model), *((f"fold-{i}", own) for i, own in enumerate(chosen)))
             for path in own.save(out_folder / name)]  # fmt: skip
    profile.save(out_folder / "latency.json")
    report["files"] = {
        str(path.relative_to(out_folder)): _sha256(path.read_bytes()) for path in [*saved, out_folder / "latency.json"]
    }
    report["sha256"] = _seal(report)
    (out_folder / "value.json").write_text(json.dumps(report, indent=1) + "\n")
    write_metrics(out_folder, VALUE_MODEL, gains(answers, held_out, against))
    write_report(out_folder)
    return report


def write_metrics(value_folder: Path, schedule: str, measured: dict[str, Any]) -> None:
    """Write metrics.json: cross-validated gains (`gains`) and the schedule that they are of.

    After fit-value that is the value model; distill writes those of what it ships.
    """
    (value_folder / "metrics.json").write_text(json.dumps({"schedule": schedule, **measured}, indent=1) + "\n")


def per_prompt(answers: Sequence[Answer], ms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and ms summed by prompt."""
    groups = prompt_groups(answers)
    return np.bincount(groups, [answer.length for answer in answers]), np.bincount(groups, ms)


def gain(answers: Sequence[Answer], ms: np.ndarray, base_ms: np.ndarray, file: str | None = None) -> dict[str, Any]:
    """Tokens per second over those of other times (answers,), with a 95 % interval paired by prompt; of one file."""
    mine = np.array([file in (None, answer.file) for answer in answers])
    chosen = [answer for answer, of_file in zip(answers, mine) if of_file]
    (tokens, own), (_, base) = per_prompt(chosen, ms[mine]), per_prompt(chosen, base_ms[mine])
    return {"gain": float(base.sum() / own.sum()), "interval": interval(speedup_draws(tokens, own, tokens, base))}


def _smaller(model: ValueModel, size: int, train: Positions, profile: LatencyProfile, drafting: Drafting) -> ValueModel:
    """The model refitted to CONTEXT and its `size` most important signals; itself if it reads no more."""
    if size >= len(model.ranking()):
        return model
    return _narrowed(model, [*CONTEXT, *model.ranking()[:size]], train, profile, drafting)


def _narrowed(
    model: ValueModel, signals: Sequence[str], train: Positions, profile: LatencyProfile, drafting: Drafting
) -> ValueModel:
    """The model refitted to these signals."""
    return ValueModel(model.kind, model.seed, signals).fit(train, profile, drafting, model)


def _test(fold: Fold, model: ValueModel, profile: LatencyProfile, drafting: Drafting) -> np.ndarray:
    return replay(fold.test, model, Cut("worth", model.rho_, profile), profile, drafting).ms


def _select(answers: Sequence[Answer], ms: dict[int, np.ndarray]) -> tuple[int, list[dict[str, float]]]:
    """The smallest number of signals within one standard error of the best, and every number's figures.

    The error is that of the ratio to the best, paired by prompt: prompts differ far more than signal sets do.
    """
    sums = {size: per_prompt(answers, times) for size, times in ms.items()}
    best = min(ms, key=lambda size: ms[size].sum())
    rows = []
    for size, (tokens, times) in sums.items():
        error = float(speedup_draws(tokens, times, *sums[best]).std())
        ratio = float(sums[best][1].sum() / times.sum())
        rows.append({"signals": size, "tokens_per_second": float(1e3 * tokens.sum() / times.sum()),
                     "of_best": ratio, "standard_error": error})  # fmt: skip
    chosen = min(row["signals"] for row in rows if row["of_best"] >= 1 - row["standard_error"])
    return int(chosen), rows


def _cross_validated(
    answers: list[Answer], learned: np.ndarray, against: Rivals, profile: LatencyProfile
) -> dict[str, Any]:
    """Held-out tokens per second, over all answers, of the value model and of what it competes with."""
    ms = {
        "autoregressive": replay(answers, Mask(0), Cut("none"), profile, AUTOREGRESSIVE.drafting).ms,
        "small": against.small,
        "medium": against.medium,
        "best mask": against.best_fixed,
        VALUE_MODEL: learned,
        "oracle over masks": against.oracle_masks,
        "oracle over masks and cuts": against.oracle,
    }
    tokens = sum(answer.length for answer in answers)
    plain = per_prompt(answers, ms["autoregressive"])
    figures: dict[str, Any] = {
        name: {"tokens_per_second": float(1e3 * tokens / times.sum()),
               "speedup": float(ms["autoregressive"].sum() / times.sum()),
               "speedup_interval": interval(speedup_draws(*per_prompt(answers, times), *plain))}
        for name, times in ms.items()
    }  # fmt: skip
    figures["value model over best mask"] = gain(answers, learned, against.best_fixed)
    return figures


def _rounds(folds: list[Fold], models: list[ValueModel], profile: LatencyProfile, drafting: Drafting) -> dict[str, Any]:
    """Of held-out rounds under the model, by file and in all: the share that calls at each step, and nodes verified."""
    called: dict[str, list[np.ndarray]] = {}
    kept: dict[str, list[np.ndarray]] = {}
    for fold, model in zip(folds, models):
        trace = replay(fold.test, model, Cut("worth", model.rho_, profile), profile, drafting).trace
        steps = trace["mask"][:, None] >> np.arange(drafting.depth) & 1
        for index, answer in enumerate(fold.test.answers):
            mine = trace["answer"] == index
            for name in (answer.file, "overall"):
                called.setdefault(name, []).append(steps[mine])
                kept.setdefault(name, []).append(trace["kept"][mine])
    calls = {name: np.concatenate(parts) for name, parts in sorted(called.items())}
    sizes = {name: np.concatenate(parts) for name, parts in sorted(kept.items())}
    return {
        "calls": {name: part.mean(axis=0).tolist() if len(part) else [0.0] * drafting.depth
                  for name, part in calls.items()},
        "verified": {name: {"mean": float(part.mean()), "median": float(np.median(part)),
                            "at_budget": float((part == drafting.budget).mean())}
                     for name, part in sizes.items() if len(part)},
    }  # fmt: skip


def score_calibration(log: Positions) -> dict[str, list[dict[str, float]]]:
    """Of the trees that each drafter builds alone: a node's s against how often it is accepted, by decile of s.

    Positions close to the end of an answer are left out: there, the limit on tokens rejects.
    """
    rows = np.flatnonzero(log.remaining > log.depth)
    found = {}
    for name, mask in (("small", 0), ("medium", (1 << log.depth) - 1)):
        log_s = log.log_s[rows, mask]
        accepted = np.zeros((len(rows), log_s.shape[1] + 1), dtype=bool)  # a rank of B stands for no node
        np.put_along_axis(accepted, log.ranks[rows, mask], True, axis=1)
        nodes = log_s > -np.inf
        s, hit = np.exp(log_s[nodes].astype(np.float64)), accepted[:, :-1][nodes]
        order = np.argsort(s, kind="stable")
        found[name] = [
            {"s": float(s[part].mean()), "accepted": float(hit[part].mean()), "nodes": len(part)}
            for part in np.array_split(order, 10) if len(part)
        ]  # fmt: skip
    return found


def _calibration(
    folds: list[Fold], models: list[ValueModel], profile: LatencyProfile, drafting: Drafting
) -> list[dict[str, float]]:
    """Predicted against realised held-out margins (tokens) of the decisions on each position's path, by decile."""
    pairs = []
    for fold, model in zip(folds, models):
        log, cut = fold.test, Cut("worth", model.rho_, profile)
        states = states_of(log, replay(log, model, cut, profile, drafting))
        predicted = model.margins(log, states)
        decisions = [margin > 0 for margin in predicted]
        leaves = all_leaves(log, cut, profile.deciding(model, drafting.depth))
        worth = leaf_worth(log, leaves, states, path(decisions)[-1], model.rho_, profile)
        realised = backward(log, worth, lambda step, _, own=decisions: own[step - 1])  # type: ignore[misc]
        rows = np.arange(len(log.position))
        for step, mask in enumerate(path(decisions)[:-1]):
            pairs.append(np.stack([predicted[step][rows, mask], realised[step][rows, mask]]))
    found = np.concatenate(pairs, axis=1)
    found = found[:, np.isfinite(found).all(axis=0)]
    found = found[:, np.argsort(found[0], kind="stable")]
    return [
        {"predicted": float(part[0].mean()), "realised": float(part[1].mean()), "decisions": part.shape[1]}
        for part in np.array_split(found, 10, axis=1)
        if part.size
    ]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _hash(log_folder: Location) -> str:
    return _sha256((log_folder / MANIFEST).read_bytes())


def _seal(report: dict[str, Any]) -> str:
    """The hash that tells whether a report, its models and its profile are those of one fit, unaltered."""
    return _sha256(json.dumps({name: value for name, value in report.items() if name != "sha256"}).encode())


@dataclass
class Value:
    """A value folder, read back with the log it was fitted to; `folds` holds each fold with its own model.

    `answers` are those fitted; `left` are the parts of the log that were not (see `divide`).
    """

    report: dict[str, Any]
    model: ValueModel
    folds: list[tuple[Fold, ValueModel]]
    answers: list[Answer]
    left: list[Part]
    manifest: dict[str, Any]
    profile: LatencyProfile

    @property
    def log_folder(self) -> Location:
        return location(self.report["log"]["folder"])

    @property
    def drafting(self) -> Drafting:
        return Drafting(**self.report["drafting"])


def load_value(folder: Path) -> Value:
    """Read a value folder and its log; raises FitError where the folder is damaged or the log is not as it was."""
    try:
        report = json.loads((folder / "value.json").read_text())
    except (OSError, ValueError) as error:
        raise FitError(f"{folder}: not a value folder ({error}); `treegraft fit-value` makes one") from error
    version = report.get("version") if isinstance(report, dict) else None
    if version != VERSION:
        raise FitError(f"{folder}: version {version!r}; this treegraft reads version {VERSION}: fit again")
    if report.get("sha256") != _seal(report):
        raise FitError(f"{folder / 'value.json'}: altered since the fit; run `treegraft fit-value` again")
    for name, digest in report["files"].items():
        if not (folder / name).exists() or _sha256((folder / name).read_bytes()) != digest:
            raise FitError(f"{folder / name}: missing or altered since the fit; run `treegraft fit-value` again")
    log_folder = location(report["log"]["folder"])
    manifest = read_manifest(log_folder)
    for name, letter in (("depth", "K"), ("width", "W"), ("children", "m"), ("budget", "B")):
        held, wanted = manifest["drafting"].get(name), report["drafting"][name]
        if held != wanted:
            raise FitError(
                f"{folder}: was fitted to a log with {letter} = {wanted}, but {log_folder} now has {letter} = {held}; "
                "run `treegraft fit-value` again"
            )
    if _hash(log_folder) != report["log"]["manifest"]:
        raise FitError(
            f"{folder}: {log_folder} has changed since this was fitted to it; run `treegraft fit-value` again"
        )
    fitted, left = divide(manifest, report["seed"], FITTED)
    answers = read_answers(log_folder, manifest, fitted)
    kind, depth = report["kind"], report["drafting"]["depth"]
    folds = [
        (
            make_fold(answers, np.array(fold["test"])),
            ValueModel.load(folder / f"fold-{i}", kind, fold["signals"], fold["rho"], depth),
        )
        for i, fold in enumerate(report["folds"])
    ]
    model = ValueModel.load(folder / "all", kind, report["signals"], report["rho"], depth)
    return Value(report, model, folds, answers, left, manifest, LatencyProfile.load(folder / "latency.json"))
