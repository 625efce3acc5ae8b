"""Compress a value model into a schedule that ships: threshold rules, a small tree, or the best fixed mask.

Students learn the value model's margins on the states that they themselves visit, and are judged by replayed tokens per
second on prompts that neither they nor their teacher saw (spec section 7).
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from treegraft.data.files import write_whole
from treegraft.distill.examples import Examples
from treegraft.distill.refine import refine
from treegraft.distill.rules import RulesStudent, sentences
from treegraft.distill.tree import TreeStudent
from treegraft.distill.vectors import vectors
from treegraft.runtime.decode import AUTOREGRESSIVE
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.latency import LatencyProfile
from treegraft.runtime.scheduler import Artifact, Mask, Rules, Schedule, TreeModel, parse_artifact
from treegraft.runtime.size import Cut
from treegraft.value_system.gains import choose_by_others, fastest, gains, held_out_ms, over_folds, rivals
from treegraft.value_system.replay import (
    Positions,
    Replay,
    best_mask,
    decide_many,
    fixed_point,
    flatten,
    named_plan,
    replay,
)
from treegraft.value_system.report import write_report
from treegraft.value_system.sample import judge
from treegraft.value_system.value import (
    States,
    ValueModel,
    features_at,
    gain,
    load_value,
    states_of,
    write_metrics,
)

KINDS = ("rules", "tree", "auto")
TURNS = 3  # of fitting a student and following it


def distill(value_folder: Path, out_path: Path, kind: str = "auto") -> dict[str, Any]:
    """Write the artifact and return a report; its "summary" says in words what ships and why.

    kind "rules" or "tree" ships that student. "auto" ships the better of the two, or the best fixed mask where that one
    does not beat it (and the masks chosen for each fold) beyond noise, or is slower on the whole log. What cannot be
    loaded again replaces nothing. Raises FitError for a value folder that cannot be used.
    """
    if kind not in KINDS:
        raise ValueError(f"--kind {kind!r}: give one of {', '.join(KINDS)}")
    if out_path.is_dir():
        raise ValueError(f"--out {out_path} is a folder; give a file, such as {out_path / 'scheduler.json'}")
    value = load_value(value_folder)
    profile, drafting = value.profile, value.drafting
    wanted = ("rules", "tree") if kind == "auto" else (kind,)
    log = flatten(value.answers)

    folds = [fold for fold, _ in value.folds]
    against = rivals(value.answers, folds, profile, drafting)
    ms = {
        AUTOREGRESSIVE.name: replay(log, Mask(0), Cut("none"), profile, AUTOREGRESSIVE.drafting).ms,
        "small": against.small,
        "medium": against.medium,
        "best mask": against.best_fixed,
    }

    def tested(schedules: Sequence[Schedule]) -> np.ndarray:
        return over_folds(folds, schedules, lambda fold, schedule: held_out_ms(fold, schedule, profile, drafting))

    students = {
        name: tested([learn(name, fold.train, model, profile, drafting) for fold, model in value.folds])
        for name in wanted
    }
    fallback = best_mask(log, profile, drafting)
    by_mask = tested([Mask(fallback)] * len(folds))

    def over_masks(learned_ms: np.ndarray) -> dict[str, Any]:
        """The gain over the best fixed mask of each fold or over the mask that would ship: the less certain one."""
        found = [gain(value.answers, learned_ms, base) for base in (against.best_fixed, by_mask)]
        return min(found, key=lambda over: over["interval"][0])

    judged = {name: over_masks(times) for name, times in students.items()}
    chosen = fastest(value.answers, students)
    of_folds = choose_by_others(value.answers, folds, students, fastest)
    held_out = over_folds(folds, of_folds, lambda fold, name: students[name][fold.index])
    better = over_masks(held_out)["interval"][0] > 1
    by_hand = fixed_point(log, Mask(fallback), profile, drafting)
    schedule: Schedule = Mask(fallback)
    ships, shipped_ms, (rho, run) = "best mask", by_mask, by_hand
    if better or kind != "auto":
        student = learn(chosen, log, value.model, profile, drafting)
        learned = fixed_point(log, student, profile, drafting)
        # The folds' students won, but this one may still have gone astray: what ships is never slower than by hand.
        if learned[0] >= by_hand[0] or kind != "auto":
            ships, shipped_ms, schedule, (rho, run) = chosen, held_out, student, learned

    baselines = [AUTOREGRESSIVE.name, "small", "medium", "best mask"]
    expected = {
        "overall": {name: gain(value.answers, shipped_ms, ms[name]) for name in baselines},
        "by_file": {
            file: {name: gain(value.answers, shipped_ms, ms[name], file) for name in baselines}
            for file in sorted({answer.file for answer in value.answers})
        },
        "calls": calls(run, drafting.depth),
    }
    measured = gains(value.answers, shipped_ms, against)
    if value.left:
        entrants = {"small": Mask(0), "medium": Mask((1 << drafting.depth) - 1), "best mask": Mask(fallback),
                    "artifact": schedule}  # fmt: skip
        plans = [named_plan(name, entrant, log, profile, drafting) for name, entrant in entrants.items()]
        measured["left_prompts"] = judge(value.log_folder, value.manifest, value.left, plans, profile)
    models = {role: model["fingerprint"] for role, model in value.manifest["models"].items()}
    artifact = Artifact(
        schedule, drafting.as_dict(), {"kind": "worth", "rho": rho, "profile": asdict(profile)}, fallback, models,
        expected, vectors(schedule, log, states_of(log, run), drafting), value.report["log"]["manifest"],
    )  # fmt: skip
    text = artifact.to_json()
    parse_artifact(text, str(out_path))  # before anything is written: what cannot be loaded replaces nothing
    out_path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out_path, text.encode())
    write_metrics(value_folder, ships, measured)
    write_report(value_folder)
    report = {
        "ships": ships,
        "fallback": fallback,
        "signals": list(schedule.reads),
        "over_best_mask": judged,
        "expected": expected,
        "left_prompts": measured.get("left_prompts"),
        "rules": list(sentences(schedule)) if isinstance(schedule, Rules) else [],
    }
    report["summary"] = _summary(report, schedule, out_path, drafting.depth, better)
    return report


def learn(
    kind: str, log: Positions, model: ValueModel, profile: LatencyProfile, drafting: Drafting
) -> Rules | TreeModel:
    """A student of `model`: fit to the states that the model visits, then to its own too; the fastest, refined."""
    cut = Cut("worth", model.rho_, profile)
    names = [name for name in model.reads if kind == "tree" or name != "step"]  # rules have a step each
    best: tuple[float, Rules | TreeModel] | None = None
    student: ValueModel | Rules | TreeModel = model
    run, seen = replay(log, model, cut, profile, drafting), []
    for _ in range(TURNS):
        seen.append(visited(student, model, log, states_of(log, run), drafting))
        values, margin, weight = (np.concatenate(parts) for parts in zip(*seen))
        examples = Examples(values, margin, weight, names)
        student = RulesStudent().fit(examples).rules_ if kind == "rules" else TreeStudent().fit(examples).tree_
        run = replay(log, student, cut, profile, drafting)
        if best is None or run.rho > best[0]:
            best = run.rho, student
    assert best is not None
    observed = [examples.values[examples.step == step] for step in range(1, log.depth + 1)]
    return refine(best[1], observed, log, cut, profile, drafting)


def visited(
    student: ValueModel | Rules | TreeModel, model: ValueModel, log: Positions, states: States, drafting: Drafting
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the student (at first the model itself) comes to decide: signals, the model's margins, weights."""
    rows = np.flatnonzero(states.weight)
    masks = np.zeros(len(rows), dtype=int)
    room = np.array([drafting.may_call(mask) for mask in range(1 << log.depth)])
    found = []
    for step in range(1, log.depth + 1):
        values = features_at(log, states, step, rows, masks)
        may = room[masks] & log.possible[rows, masks | 1 << (step - 1)]
        found.append((values[may], model.predict(step, values[may]), states.weight[rows[may]]))
        masks |= (may & decide_many(student, step, masks, values)) << (step - 1)
    values, margin, weight = (np.concatenate(parts) for parts in zip(*found))
    known = np.isfinite(margin)
    return values[known], margin[known], weight[known]


def calls(run: Replay, depth: int) -> dict[str, list[float]]:
    """The share of a replay's rounds that call the medium drafter at step 1, 2, ..., in all and by file."""
    file = np.array([answer.file for answer in run.answers])[run.trace["answer"]]
    called = run.trace["mask"][:, None] >> np.arange(depth) & 1
    chosen = {"overall": np.ones(len(file), bool), **{name: file == name for name in sorted(set(file.tolist()))}}
    return {name: [round(share, 6) for share in called[rows].mean(axis=0).tolist()] for name, rows in chosen.items()}


def _summary(report: dict[str, Any], schedule: Schedule, out_path: Path, depth: int, better: bool) -> str:
    over = report["expected"]["overall"]

    def words(found: dict[str, Any]) -> str:
        return f"{found['gain']:.3f} times (95 % interval {found['interval'][0]:.3f} .. {found['interval'][1]:.3f})"

    mask = f"{report['fallback']:#0{depth + 2}b}"
    lines = []
    if isinstance(schedule, Mask):
        tried = "; ".join(f"{name} {words(found)}" for name, found in report["over_best_mask"].items())
        why = (
            "what was learned from all prompts is slower than it there, though on held-out prompts" if better
            else "no learned schedule beats it beyond noise on held-out prompts"
        )  # fmt: skip
        lines.append(f"{out_path}: the mask {mask}, as {why}: {tried}.")
    else:
        if isinstance(schedule, Rules):
            count = sum(len(rule.conditions) for rule in schedule.rules)
            size = f"{count} condition{'s' * (count != 1)}"
        else:
            count = schedule.feature.count(-1)
            size = f"a tree of {count} {'leaf' if count == 1 else 'leaves'}"
        read = ", ".join(schedule.reads) or "nothing"
        verdict = "" if better else ", which is within noise"
        lines.append(f"{out_path}: {size}, reading {read}; fallback {mask}.")
        lines.append(f"Held-out prompts, against the best fixed mask: {words(over['best mask'])}{verdict}.")
    if left := report["left_prompts"]:
        found = left["overall"]["artifact"]["over"]["best mask"]
        lines.append(f"Prompts of the log that were not fitted, against the best fixed mask: {words(found)}.")
    lines += [f"Against {name}: {words(over[name])}." for name in (AUTOREGRESSIVE.name, "small", "medium")]
    return "\n".join([*lines, *report["rules"]])
