"""The artifact's file: canonical, sealed, checked whatever it holds, and verified from plain tree states on."""

import itertools
import json
import math
import resource
import time
from dataclasses import asdict, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from artifacts import DRAFTING, RULES, SCHEDULES, TREE, make, seal, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from log_fixture import COSTLY

from treegraft.distill.describe import describe
from treegraft.distill.vectors import way_of
from treegraft.runtime.plan import plan_from_artifact
from treegraft.runtime.scheduler import (
    Artifact,
    Mask,
    Rules,
    Schedule,
    ScheduleError,
    TreeModel,
    load_artifact,
    parse_artifact,
)
from treegraft.runtime.signals import SIGNALS
from treegraft.runtime.size import Cut
from treegraft.runtime.verify import SCHEMA, verify

WORTH = {"kind": "worth", "rho": 0.5, "profile": asdict(COSTLY)}
PLAIN = json.loads(Artifact(RULES, DRAFTING.as_dict(), {"kind": "none"}, 0, {}).to_json())


@pytest.fixture(scope="module", params=SCHEDULES, ids=["mask", "rules", "tree"])
def artifact(request: pytest.FixtureRequest) -> Artifact:
    return make(request.param)


def test_an_artifact_survives_the_round_trip_in_equal_bytes(artifact: Artifact, tmp_path: Path) -> None:
    path = write(tmp_path / "scheduler.json", artifact.to_json())
    loaded = load_artifact(path)
    assert loaded == artifact and loaded.to_json() == path.read_text() == make(artifact.schedule).to_json()
    assert plan_from_artifact(loaded, "mine").cut == Cut("score", log_s=-2.0)


def test_an_artifact_made_before_profiles_told_first_calls_and_decisions_apart_still_loads(tmp_path: Path) -> None:
    later = {"medium_first_ms": 0.0, "decision_ms": 0.0, "uncertainty_ms": 0.0}
    profile = {name: value for name, value in WORTH["profile"].items() if name not in later}
    artifact = Artifact(RULES, DRAFTING.as_dict(), {**WORTH, "profile": profile}, 0, {})
    loaded = load_artifact(write(tmp_path / "scheduler.json", artifact.to_json()))
    assert plan_from_artifact(loaded, "mine").cut.profile == replace(COSTLY, **later)


def test_verify_accepts_what_treegraft_writes(artifact: Artifact, tmp_path: Path) -> None:
    path = write(tmp_path / "scheduler.json", artifact.to_json())
    assert verify(path) == artifact
    assert len(artifact.vectors) >= 64
    assert seal(json.loads(path.read_text())) == path.read_text()


def test_the_test_vectors_reach_every_branch(artifact: Artifact) -> None:
    schedule = artifact.schedule
    ways = {way_of(schedule, v["state"]["step"], v["signals"]) for v in artifact.vectors}
    assert {step for step, _ in ways} == {1, 2, 3}
    if isinstance(schedule, TreeModel):
        leaves = {value for value, feature in zip(schedule.value, schedule.feature) if feature < 0}
        assert {v["margin"] for v in artifact.vectors} == leaves
    if isinstance(schedule, Rules):
        taken = {(where, low) for _, compared in ways for where, _, _, low in compared}
        every = {(i, j) for i, rule in enumerate(schedule.rules) for j in range(len(rule.conditions))}
        assert taken == set(itertools.product(every, (True, False)))


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda d: d["vectors"][40]["signals"].update(pool_size=77.0), r"vectors\[40\].signals.pool_size is 77.0"),
        (lambda d: d["vectors"][40]["state"].update(parent=[3, 3]), r"vectors\[40\].state is not a draft tree"),
        (lambda d: d["vectors"][40]["state"].update(planned=99), r"vectors\[40\].state.planned is 99"),
        (lambda d: d["vectors"].pop(), r"\$.vectors does not keep to the schema"),
        (lambda d: d["models"].pop("medium"), r"\$.models does not keep to the schema"),
    ],
)  # fmt: skip
def test_verify_names_what_is_at_fault_in_a_file_that_loads(change: Any, complaint: str, tmp_path: Path) -> None:
    schedule = TreeModel((0, -1, -1), (1000.0, 0.0, 0.0), (1, -1, -1), (2, -1, -1), (0.0, -1.0, 1.0), ("pool_size",))
    data = json.loads(make(schedule).to_json())
    change(data)
    path = write(tmp_path / "scheduler.json", seal(data))
    load_artifact(path)
    with pytest.raises(ScheduleError, match=complaint):
        verify(path)


def test_the_schema_knows_every_signal_and_no_other() -> None:
    assert json.loads(SCHEMA.read_text())["properties"]["signals"]["items"]["enum"] == list(SIGNALS)


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"version": 99}, "version 99 is not known"), ({"version": "9" * 1000}, "is not known"),
        ({"models": {"target": "\x1b[2J"}}, "models.target is '\\x1b[2J'"), ({"log": "0" * 1000}, "log is '000"),
        ({"expected": {"\ud800": 1}}, "a name is '\\ud800'"), ({"expected": {"x" * 1000: 1}}, "a name is 'xxx"),
        ({"format": "x"}, "not a treegraft-scheduler"),
        ({"signals": ["unheard_of"]}, "signals[0] is 'unheard_of'"), ({"kind": "neural"}, "kind is 'neural'"),
        ({"rules": [{"step": 1, "all": [["lag", "==", 1.0]]}]}, "rules[0].all[0][1] is '=='"),
        ({"rules": [{"step": 9, "all": []}]}, "rules[0].step is 9"),
        ({"rules": [{"step": 1, "all": [["lag", ">", "x"]]}]}, "rules[0].all[0][2] is 'x'"),
        ({"rules": [{"step": 1, "all": [["tree_size", ">", 1.0]]}]}, "rules[0].all[0][0] is 'tree_size'"),
        ({"rules": [{"all": [], "step": 1}] * 10_000}, "rules is"),
        ({"rules": None}, "rules is None"), ({"fallback": None}, "fallback is None"),
        ({"fallback": 8}, "fallback is 8"),
        ({"drafting": {**PLAIN["drafting"], "depth": 99}}, "depth is 99"),
        ({"drafting": {**PLAIN["drafting"], "width": 2.5}}, "drafting.width is 2.5"),
        ({"drafting": {**PLAIN["drafting"], "wide": 2}}, "drafting.wide is not known"),
        ({"drafting": {k: v for k, v in PLAIN["drafting"].items() if k != "pool"}}, "drafting.pool is missing"),
        ({"cut": {"kind": "score", "log_s": 1.0}}, "cut.log_s is 1.0"),
        ({"cut": {"kind": "worth"}}, "cut.rho is missing"),
        ({"cut": {**WORTH, "profile": {**WORTH["profile"], "machine": 5}}}, "cut.profile.machine is 5"),
        ({"cut": {**WORTH, "profile": {**WORTH["profile"], "round_ms": None}}}, "cut.profile.round_ms is None"),
        ({"cut": {**WORTH, "profile": {**WORTH["profile"], "medium_first_ms": -1.0}}}, "medium_first_ms is -1.0"),
        ({"cut": {**WORTH, "profile": {**WORTH["profile"], "hour_ms": 1.0}}}, "cut.profile.hour_ms is not known"),
        ({"cut": {**WORTH, "profile": {**WORTH["profile"], "target": {
            **WORTH["profile"]["target"], "context_ms": 10**400}}}}, "cut.profile.target.context_ms is 1000"),
        ({"cut": {"kind": "worth", "rho": -1.0}}, "cut.rho is -1.0"), ({"cut": {"kind": "best"}}, "cut.kind is 'best'"),
        ({"models": {"target": 5}}, "models.target is 5"), ({"log": 5}, "log is 5"),
        ({"expected": {"overall": {"small": {"gain": "much"}}}}, "expected.overall.small.gain is 'much'"),
        ({"vectors": [{"state": {"step": 1, "mask": 0}, "signals": {}, "invoke": True}]},
         "vectors[0].signals.root_match is missing"),
        ({"surprise": 1}, "was edited"),
        ({"kind": "tree", "tree": {key: [0] for key in ("feature", "threshold", "left", "right", "value")}}, "left[0]"),
        ({"kind": "tree", "tree": {"feature": [0, -1], "threshold": [0.0, 0.0], "left": [1, -1], "right": [1, -1],
                                   "value": [0.0, 0.0]}}, "make no tree"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_its_file(tmp_path: Path, changes: dict, complaint: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        load_artifact(write(tmp_path / "scheduler.json", seal({**PLAIN, **changes})))
    assert "scheduler.json: " in str(caught.value) and complaint in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "edit, complaint",
    [
        (lambda text: text[:-20], "not whole JSON"), (lambda text: text.replace("1.5", "2.5"), "edited"),
        (lambda text: text.replace(",", ", "), "edited"),
        (lambda text: text.replace("{", '{"log":"",', 1), "'log' twice"),
        (lambda text: text.replace("1.5", "NaN"), "NaN"), (lambda text: text.replace("1.5", "1e999"), "finite number"),
        (lambda text: text.replace("1.5", "9" * 400), "finite number"),
        (lambda text: text.replace("1.5", "9" * 5000), "not whole JSON"),
        (lambda text: "[" * 1_000_000, "nested too deeply"), (lambda text: "", "not whole JSON"),
        (lambda text: "\x00" * 9, "not whole JSON"), (lambda text: "[]", "must be an object"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused_by_what_is_wrong_with_it(tmp_path: Path, edit: Any, complaint: str) -> None:
    path = write(tmp_path / "scheduler.json", edit(seal(PLAIN)))
    with pytest.raises(ScheduleError, match=r"scheduler\.json") as caught:
        load_artifact(path)
    assert complaint in str(caught.value)


def test_what_is_no_artifact_file_at_all_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "absent.json", tmp_path, Path("/dev/zero"), tmp_path / "binary.json"):
        with pytest.raises(ScheduleError, match=path.name):
            load_artifact(path)


def test_a_hundred_megabytes_are_refused_without_reading_them(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.json"
    with path.open("wb") as file:
        file.truncate(100_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ScheduleError, match="more than 4000000 bytes"):
        load_artifact(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # in kB


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.sampled_from([10**400, -1, 0, 1, 2]),
    st.sampled_from([*SIGNALS, "<=", ">", "tree", "mask", "worth", "score"]),
)  # fmt: skip
VALUES = st.one_of(LEAVES, st.lists(LEAVES, max_size=3), st.dictionaries(st.text(max_size=3), LEAVES, max_size=2))
BASES = [
    PLAIN,
    json.loads(Artifact(TREE, DRAFTING.as_dict(), {"kind": "score", "log_s": -1.0}, 5, {"target": "a"}).to_json()),
    json.loads(Artifact(Mask(3), DRAFTING.as_dict(), WORTH, 5, {}).to_json()),
]  # fmt: skip


def places(value: Any, path: tuple = ()) -> list[tuple]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, below in inside for place in places(below, (*path, key)))]


def replaced(value: Any, path: tuple, new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


WHERE = [(base, place) for base in BASES for place in places(base) if place]
TALLY = {"tried": 0, "loaded": 0}


@settings(max_examples=1000, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(cases=st.lists(st.tuples(st.integers(0, len(WHERE) - 1), VALUES), min_size=10, max_size=10))
def fuzz(cases: list[tuple[int, Any]]) -> None:
    """Each case: a field replaced by anything, sealed; it is refused, or the schedule never raises."""
    for where, value in cases:
        TALLY["tried"] += 1
        try:
            artifact = parse_artifact(seal(replaced(*WHERE[where], value)), "mutated.json")
            plan_from_artifact(artifact, "mutated.json").cut.size([-0.5, -1.0], 9)
            describe(artifact)
        except ScheduleError as error:
            assert "mutated.json: " in str(error)
            continue
        TALLY["loaded"] += 1
        artifact.fallbacks = 1  # the warning has been given
        for step in (1, 2, 16):
            for signals in ({}, dict.fromkeys(artifact.reads, math.nan), dict.fromkeys(artifact.reads, 1.0)):
                assert artifact.decide(step, 0, signals) in (True, False)


def test_ten_thousand_mutated_artifacts_are_refused_or_sound() -> None:
    fuzz()
    assert TALLY["tried"] >= 10_000 and 100 < TALLY["loaded"] < 5_000


def test_a_cut_short_or_altered_byte_is_always_noticed() -> None:
    whole = seal(PLAIN)
    for at in range(len(whole)):
        for text in (whole[:at], whole[:at] + chr(ord(whole[at]) ^ 1) + whole[at + 1 :]):
            with pytest.raises(ScheduleError, match="mine: "):
                parse_artifact(text, "mine")


def test_the_largest_artifact_that_loads_does_so_in_bounded_time(tmp_path: Path) -> None:
    chain = [node for pair in ((0, -1) for _ in range(511)) for node in pair] + [-1]
    size = len(chain)
    left = [node + 1 if node % 2 == 0 and node < size - 1 else -1 for node in range(size)]
    right = [node + 2 if node % 2 == 0 and node < size - 1 else -1 for node in range(size)]
    tree = {"feature": chain, "left": left, "right": right, "threshold": [0.0] * size, "value": [1.0] * size}
    vector = {"state": {"step": 1, "mask": 0}, "signals": {"lag": 1.0}, "margin": 1.0, "invoke": True}
    data = {**PLAIN, "kind": "tree", "tree": tree, "signals": ["lag"], "vectors": [vector] * 1024}
    data.pop("rules")
    start = time.process_time()
    deep = load_artifact(write(tmp_path / "scheduler.json", seal(data)))
    assert time.process_time() - start < 20 and deep.decide(1, 0, {"lag": 1.0})
    assert describe(deep).count("if lag") == 511


def test_a_surprise_at_run_time_means_the_fallback_one_warning_and_a_count(recwarn: pytest.WarningsRecorder) -> None:
    mine = Artifact(RULES, DRAFTING.as_dict(), {"kind": "none"}, 0b10, {})
    sound = dict.fromkeys(RULES.reads, 1.0)
    surprises: list[Any] = [math.nan, math.inf, -math.inf, None, "x", [], 10**400, 1j, Decimal("sNaN")]
    for value in surprises:
        assert not mine.decide(1, 0, {**sound, "lag": value}) and mine.decide(2, 0, {**sound, "lag": value})
    assert mine.decide(2, 0, {}) and not mine.decide(1, 0, sound)
    assert mine.fallbacks == 2 * len(surprises) + 1
    assert [str(w.message) for w in recwarn] == ["signal 'lag' is missing or not finite; using the fallback schedule"]


def test_huge_but_finite_signals_are_no_surprise() -> None:
    mine = Artifact(RULES, DRAFTING.as_dict(), {"kind": "none"}, 0, {})
    assert mine.decide(1, 0, dict.fromkeys(RULES.reads, 1e308)) and not mine.fallbacks


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["mask", "rules", "tree"])
def test_inspect_says_what_it_does_how_often_and_what_it_is_worth(schedule: Schedule) -> None:
    said = describe(make(schedule))
    assert "step 1  ##########..........  50.0%" in said and "f0: 0.75 calls a round" in said
    assert "overall, small: 1.250 (1.125 .. 1.500): faster" in said
    assert "f0, medium: 0.875 (0.750 .. 0.938): slower" in said
    for name in schedule.reads:
        assert f"  {name}: {SIGNALS[name].definition}" in said
    if isinstance(schedule, Mask):
        assert "Always calls the medium drafter at step 1, 3." in said
    elif isinstance(schedule, Rules):
        assert (
            "At step 2, call the medium drafter if frontier_score_mean is at most -0.25 and lag is above 2.5." in said
        )
        assert "follows the mask 0b010" in said
    else:
        assert "if step is at most 1.5:\n  if target_margin is at most 0.25:\n    call the medium drafter" in said
