"""Distillation: what ships on logs where the answer is known, its size, its test vectors, its round trip."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from log_fixture import PLANTED, PLANTED_PROFILE, planted_log, random_log, write_log

from treegraft.data.log import LogError
from treegraft.distill import distill as distilling
from treegraft.distill.distill import distill, learn
from treegraft.distill.examples import Examples, midpoint
from treegraft.distill.rules import RulesStudent, sentences
from treegraft.distill.tree import TreeStudent
from treegraft.distill.vectors import vectors
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.latency import LatencyProfile
from treegraft.runtime.plan import plan_from_artifact
from treegraft.runtime.scheduler import Mask, Rule, Rules, ScheduleError, TreeModel, load_artifact
from treegraft.runtime.signals import LOGGED
from treegraft.runtime.verify import verify
from treegraft.value_system.gains import evaluate
from treegraft.value_system.replay import NAMES, best_mask, decide_many, fixed_point, flatten, replay
from treegraft.value_system.value import ValueModel, fit_value, states_of

BEST = Rules((Rule(1, (("root_match", ">", 2.0),)),), ("root_match",))


@pytest.fixture(scope="module")
def value(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A value folder of a log with a planted signal."""
    folder = tmp_path_factory.mktemp("distill")
    write_log(folder / "log", planted_log(0), PLANTED)
    fit_value(folder / "log", PLANTED_PROFILE, folder / "value")
    return folder / "value"


@pytest.mark.parametrize("kind", ["auto", "rules", "tree"])
def test_a_planted_signal_ships(value: Path, tmp_path: Path, kind: str) -> None:
    report = distill(value, tmp_path / "scheduler.json", kind)
    artifact = verify(tmp_path / "scheduler.json")
    assert report["ships"] in (("rules", "tree") if kind == "auto" else (kind,))
    assert "root_match" in artifact.reads
    test = planted_log(1)
    ideal, _ = fixed_point(test, BEST, PLANTED_PROFILE, PLANTED)
    plan = plan_from_artifact(artifact, "learned")
    assert evaluate(test, [plan], PLANTED_PROFILE)["rho"]["learned"] > 0.97 * ideal
    over = artifact.expected["overall"]
    assert over["best mask"]["gain"] > 1.1 and over["best mask"]["interval"][0] > 1
    assert over["small"]["gain"] > over["best mask"]["gain"] and set(artifact.expected["by_file"]) == {"f0", "f1"}
    assert artifact.fallback == best_mask(planted_log(0), PLANTED_PROFILE, PLANTED) == 0b01
    assert artifact.models == {"target": "target-print", "medium": "medium-print"}
    assert artifact.log == hashlib.sha256((value.parent / "log" / "manifest.json").read_bytes()).hexdigest()
    called = artifact.expected["calls"]
    assert set(called) == {"overall", "f0", "f1"} and 0.3 < called["overall"][0] < 0.7 and called["overall"][1] < 0.1
    assert artifact.cut["kind"] == "worth" and artifact.cut["rho"] == pytest.approx(ideal, rel=0.1)
    assert plan.drafting == PLANTED and plan.cut.profile == PLANTED_PROFILE
    assert len(artifact.vectors) >= 64 and {v["invoke"] for v in artifact.vectors} == {True, False}
    assert f"{over['best mask']['gain']:.3f} times" in report["summary"]


def test_signals_that_say_nothing_leave_the_best_mask(tmp_path: Path) -> None:
    write_log(tmp_path / "log", planted_log(2, informative=False), PLANTED)
    fit_value(tmp_path / "log", PLANTED_PROFILE, tmp_path / "value")
    report = distill(tmp_path / "value", tmp_path / "scheduler.json")
    artifact = load_artifact(tmp_path / "scheduler.json")
    assert report["ships"] == "best mask" and artifact.schedule == Mask(0b01) and artifact.fallback == 0b01
    assert "as no learned schedule beats it" in report["summary"]
    assert artifact.expected["overall"]["best mask"] == {"gain": 1.0, "interval": [1.0, 1.0]}


def test_a_student_that_went_astray_on_the_whole_log_gives_way_to_the_best_mask(
    value: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = TreeModel((-1,), (0.0,), (-1,), (-1,), (-1.0,), ())

    def astray(kind, log, *rest):  # type: ignore[no-untyped-def]
        return never if len(log.answers) == len(planted_log(0)) else learn(kind, log, *rest)

    monkeypatch.setattr(distilling, "learn", astray)
    report = distill(value, tmp_path / "scheduler.json")
    artifact = verify(tmp_path / "scheduler.json")
    assert report["ships"] == "best mask" and artifact.schedule == Mask(0b01)
    assert all(judged["interval"][0] > 1 for judged in report["over_best_mask"].values())
    assert "the mask 0b01, as what was learned from all prompts is slower than it there" in report["summary"]
    assert artifact.expected["overall"]["best mask"] == {"gain": 1.0, "interval": [1.0, 1.0]}
    distill(value, tmp_path / "tree.json", kind="tree")  # asked for by name, it ships as it is
    assert load_artifact(tmp_path / "tree.json").schedule == never


def test_an_artifact_is_the_same_again(value: Path, tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        distill(value, tmp_path / name)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def noisy_examples(seed: int = 0) -> Examples:
    """A function of many signals that neither a few rules nor a small tree can follow."""
    generator = np.random.default_rng(seed)
    values = generator.normal(size=(6000, len(NAMES))).astype(np.float32).astype(np.float64)
    values[:, NAMES.index("step")] = generator.integers(1, 6, len(values))
    margin = np.sin(3 * values[:, 5:11]).prod(axis=1) * 4 + generator.normal(size=len(values)) * 0.3
    return Examples(values, margin, generator.integers(0, 4, len(values)) + 0.1, [*NAMES[5:12], "step"])


def test_rules_stay_within_sixteen_conditions() -> None:
    rules = RulesStudent().fit(noisy_examples()).rules_
    assert 8 <= sum(len(rule.conditions) for rule in rules.rules) <= 16
    assert set(rules.reads) == {name for rule in rules.rules for name, _, _ in rule.conditions}
    assert all(sentence.startswith("At step") and sentence.endswith(".") for sentence in sentences(rules))
    assert len(sentences(rules)) == len(rules.rules)
    assert sentences(Rules((), ())) == ["Never call the medium drafter."]
    assert sentences(BEST) == ["At step 1, call the medium drafter if root_match is above 2."]


def test_a_tree_stays_within_sixty_four_leaves() -> None:
    tree = TreeStudent().fit(noisy_examples()).tree_
    assert 16 <= tree.feature.count(-1) <= 64
    for node, feature in enumerate(tree.feature):
        if feature >= 0:  # siblings that decide alike were merged
            children = tree.left[node], tree.right[node]
            leaves = [child for child in children if tree.feature[child] < 0]
            assert len(leaves) < 2 or (tree.value[leaves[0]] > 0) != (tree.value[leaves[1]] > 0)


def test_fewer_leaves_are_those_that_gain_most() -> None:
    examples = noisy_examples(2)
    x = examples.x[:, 0]
    # Step 1: three bands of little worth. Step 2: one boundary of great worth.
    examples.margin[:] = np.where(
        examples.step == 1, np.where(np.abs(x) < 0.5, 0.1, -0.1), np.where(x > 0.25, 3.0, -3.0)
    )
    examples.weight[:] = np.where(examples.step <= 2, 1.0, 1e-9)
    for leaves, right in ((4, examples.step == 2), (6, examples.step <= 2)):
        tree = TreeStudent(leaves).fit(examples).tree_
        assert tree.feature.count(-1) <= leaves
        decided = decide_many(tree, 1, np.zeros(len(x), int), examples.values)
        assert (decided == (examples.margin > 0))[right].mean() > 0.99


def test_a_students_decisions_are_those_of_least_regret() -> None:
    examples = noisy_examples(1)
    split = examples.values[:, 5] > 0.25
    examples.margin[:] = np.where(split & (examples.step == 2), 2.0, -1.0)
    for student in (RulesStudent().fit(examples).rules_, TreeStudent().fit(examples).tree_):
        assert isinstance(student, Rules | TreeModel)
        made = [
            student.decide(int(step), 0, dict(zip(NAMES, row)))
            for step, row in zip(examples.step[:500], examples.values[:500].tolist())
        ]
        assert made == (examples.margin[:500] > 0).tolist()


def test_thresholds_lie_between_the_logs_values() -> None:
    examples = noisy_examples()
    examples.values[:, NAMES.index("step")] = 2  # every step has values of its own
    student = TreeStudent().fit(examples).tree_
    for feature, threshold in zip(student.feature, student.threshold):
        if feature >= 0:
            observed = np.unique(examples.values[:, NAMES.index(student.reads[feature])])
            at = np.searchsorted(observed, threshold)
            assert observed[at - 1] < threshold < observed[at]
            assert threshold == (observed[at - 1] + observed[at]) / 2
    assert midpoint(np.array([0.0, 1.0, 4.0]), 1.3) == 2.5 and midpoint(np.array([0.0, 1.0]), 1.0) == 1.0


@pytest.mark.parametrize("kind", ["rules", "tree"])
def test_test_vectors_cover_every_way_to_decide(kind: str) -> None:
    log = flatten(planted_log(3))
    model = ValueModel().fit(log, PLANTED_PROFILE, PLANTED)
    student = learn(kind, log, model, PLANTED_PROFILE, PLANTED)
    states = states_of(log, fixed_point(log, student, PLANTED_PROFILE, PLANTED)[1])
    made = vectors(student, log, states, PLANTED)
    assert len(made) >= 64
    assert all(student.decide(v["state"]["step"], v["state"]["mask"], v["signals"]) == v["invoke"] for v in made)
    if isinstance(student, TreeModel):
        leaves = {value for value, feature in zip(student.value, student.feature) if feature < 0}
        assert {student.margin(v["signals"]) for v in made} == leaves
    else:
        for rule in student.rules:
            assert any(v["state"]["step"] == rule.step and rule.holds(v["signals"]) for v in made)


def test_a_student_keeps_to_the_budget_of_medium_calls() -> None:
    answers = random_log(0, (30, 30, 30))
    limited = Drafting(depth=3, budget=6, medium_calls=1)
    log = flatten([
        replace(a, possible=a.possible & np.array([mask.bit_count() <= 1 for mask in range(8)])) for a in answers
    ])  # fmt: skip
    profile = LatencyProfile.what_if(0.01)
    model = ValueModel().fit(log, profile, limited)
    for kind in ("rules", "tree"):
        student = learn(kind, log, model, profile, limited)
        _, run = fixed_point(log, student, profile, limited)
        assert max(int(mask).bit_count() for mask in run.trace["mask"]) == 1


@pytest.mark.parametrize("calls", [0, 1])
@pytest.mark.parametrize("kind", ["auto", "rules", "tree"])
def test_a_log_with_few_medium_calls_distils(tmp_path: Path, calls: int, kind: str) -> None:
    limited = Drafting(depth=3, budget=6, medium_calls=calls)
    within = np.array([mask.bit_count() <= calls for mask in range(8)])
    answers = [replace(answer, possible=answer.possible & within) for answer in random_log(0, (30, 30, 30))]
    fit_value(write_log(tmp_path / "log", answers, limited), LatencyProfile.what_if(0.01), tmp_path / "value")
    distill(tmp_path / "value", tmp_path / "scheduler.json", kind)
    assert verify(tmp_path / "scheduler.json").drafting["medium_calls"] == calls


def test_a_fold_that_learns_from_short_answers_alone_still_has_a_student(tmp_path: Path) -> None:
    write_log(tmp_path / "log", random_log(1, (40, 4)), Drafting(depth=3, budget=6))
    fit_value(tmp_path / "log", LatencyProfile.what_if(0.3), tmp_path / "value")
    distill(tmp_path / "value", tmp_path / "scheduler.json", "tree")
    verify(tmp_path / "scheduler.json")


def test_a_masks_figures_are_its_own(tmp_path: Path) -> None:
    write_log(tmp_path / "log", planted_log(2, informative=False), PLANTED)
    fit_value(tmp_path / "log", LatencyProfile.what_if(3.0), tmp_path / "value")
    distill(tmp_path / "value", tmp_path / "scheduler.json")
    artifact = load_artifact(tmp_path / "scheduler.json")
    assert artifact.schedule == Mask(0)
    assert artifact.expected["overall"]["small"] == {"gain": 1.0, "interval": [1.0, 1.0]}


def test_what_does_not_beat_the_mask_that_would_ship_does_not_ship(value: Path, tmp_path: Path, monkeypatch) -> None:
    # The folds' masks are poor rivals, the log's own is as good as what was learned.
    found = distilling.held_out_ms
    monkeypatch.setattr(distilling, "held_out_ms", lambda fold, *rest: found(fold, BEST, *rest[1:]))
    report = distill(value, tmp_path / "scheduler.json")
    assert report["ships"] == "best mask"
    assert all(over == {"gain": 1.0, "interval": [1.0, 1.0]} for over in report["over_best_mask"].values())


def test_a_distillation_that_fails_replaces_nothing(value: Path, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "scheduler.json"
    distill(value, path, "rules")
    kept = [file.read_bytes() for file in (path, value / "metrics.json", value / "report.html")]
    with monkeypatch.context() as patch:
        patch.setattr(distilling, "vectors", lambda *_: [{"state": {}}])
        with pytest.raises(ScheduleError, match="vectors"):
            distill(value, path, "tree")
    with pytest.raises(ValueError, match="is a folder; give a file"):
        distill(value, tmp_path, "tree")
    assert [file.read_bytes() for file in (path, value / "metrics.json", value / "report.html")] == kept


def test_an_artifact_for_another_k_does_not_replay(value: Path, tmp_path: Path) -> None:
    distill(value, tmp_path / "scheduler.json")
    plan = plan_from_artifact(load_artifact(tmp_path / "scheduler.json"), "learned")
    with pytest.raises(LogError, match="K = 3, but the schedule drafts with K = 2"):
        replay(random_log(0, (9,)), plan.schedule, plan.cut, PLANTED_PROFILE, plan.drafting)


def test_an_unknown_kind_is_refused(value: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--kind 'forest'"):
        distill(value, tmp_path / "scheduler.json", "forest")


def test_an_artifact_holds_json_alone(value: Path, tmp_path: Path) -> None:
    distill(value, tmp_path / "scheduler.json", "tree")
    data = json.loads((tmp_path / "scheduler.json").read_text())
    assert set(data["signals"]) <= {*LOGGED, *NAMES} and data["drafting"] == PLANTED.as_dict()
