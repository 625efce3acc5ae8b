import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from treegraft.runtime.drafting import Drafting
from treegraft.runtime.plan import make_cut, make_plan, plan_from_artifact
from treegraft.runtime.scheduler import (
    Artifact,
    Mask,
    Rule,
    Rules,
    ScheduleError,
    TreeModel,
    load_artifact,
    parse_mask,
)
from treegraft.runtime.size import Cut

RULES = Rules(
    (Rule(1, (("lag", "<=", 4.0),)), Rule(2, (("lag", ">", 4.0), ("match_mean", "<=", 1.5)))), ("lag", "match_mean")
)
TREE = TreeModel((0, -1, -1), (2.5, 0.0, 0.0), (1, 0, 0), (2, 0, 0), (0.0, 0.25, -0.5), ("tree_size",))

LOOP = {name: [0] for name in ("feature", "threshold", "left", "right", "value")}


def artifact(schedule: Mask | Rules | TreeModel = RULES) -> Artifact:
    vectors = [{"step": 1, "mask": 0, "signals": {"lag": 3.0, "match_mean": 0.0, "tree_size": 9}, "invoke": None}]
    for vector in vectors:
        vector["invoke"] = schedule.decide(1, 0, vector["signals"])
    models = {"target": "a", "medium": "b"}
    return Artifact(schedule, Drafting().as_dict(), {"kind": "score", "log_s": -2.0}, 0, models, {}, vectors)


def written(folder: Path, **changes: object) -> Path:
    path = folder / "scheduler.json"
    path.write_text(json.dumps({**json.loads(artifact().to_json()), **changes}))
    return path


def test_small_medium_and_masks_are_schedules_with_bit_0_as_step_1() -> None:
    assert [parse_mask("0b00101", 5).decide(k, 0, {}) for k in range(1, 6)] == [True, False, True, False, False]
    assert parse_mask("small", 5) == Mask(0) and parse_mask("medium", 5) == Mask(31) and parse_mask("5", 5) == Mask(5)
    with pytest.raises(ScheduleError, match="K = 3"):
        parse_mask("0b1000", 3)
    with pytest.raises(ScheduleError, match="'wrong'"):
        make_plan("wrong", Drafting(), Cut("none"))


def test_rules_call_where_all_conditions_of_any_rule_of_the_step_hold() -> None:
    assert RULES.decide(1, 0, {"lag": 4.0, "match_mean": 9.0})
    assert not RULES.decide(1, 0, {"lag": 4.1, "match_mean": 9.0})
    assert RULES.decide(2, 0, {"lag": 5.0, "match_mean": 1.5})
    assert not RULES.decide(2, 0, {"lag": 5.0, "match_mean": 1.6})
    assert not RULES.decide(3, 0, {"lag": 0.0, "match_mean": 0.0})


def test_a_tree_calls_where_its_margin_is_positive() -> None:
    assert TREE.margin({"tree_size": 2.5}) == 0.25 and TREE.decide(1, 0, {"tree_size": 2})
    assert TREE.margin({"tree_size": 3}) == -0.5 and not TREE.decide(1, 0, {"tree_size": 3})


@pytest.mark.parametrize("schedule", [Mask(5), RULES, TREE])
def test_an_artifact_survives_the_round_trip_in_equal_bytes(tmp_path: Path, schedule: Mask | Rules | TreeModel) -> None:
    path = tmp_path / "scheduler.json"
    path.write_text(artifact(schedule).to_json())
    loaded = load_artifact(path)
    assert loaded.schedule == schedule and loaded.to_json() == path.read_text()
    assert plan_from_artifact(loaded, "mine").cut == Cut("score", log_s=-2.0)


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"version": 99}, "version 99 is not known"), ({"format": "x"}, "not a treegraft-scheduler"),
        ({"signals": ["unheard_of"]}, "unheard_of"), ({"kind": "neural"}, "neural"),
        ({"rules": [{"step": 1, "all": [["lag", "==", 1]]}]}, "=="), ({"fallback": None}, "damaged"),
        ({"rules": [{"step": 1, "all": [["lag", ">", float("inf")]]}]}, "finite"),
        ({"rules": []}, "vector 0"),
        ({"kind": "tree", "tree": LOOP}, "node 0"),
    ],
)  # fmt: skip
def test_a_damaged_artifact_is_refused_with_the_file_and_the_fault(
    tmp_path: Path, changes: dict, complaint: str
) -> None:
    with pytest.raises(ScheduleError, match=r"scheduler\.json") as caught:
        load_artifact(written(tmp_path, **changes))
    assert complaint in str(caught.value)


def test_a_truncated_a_nested_and_an_absent_artifact_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text(path.read_text()[:-20])
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    for bad in (path, deep, tmp_path / "absent.json"):
        with pytest.raises(ScheduleError, match=bad.name):
            load_artifact(bad)


def test_a_surprise_at_run_time_means_the_fallback_one_warning_and_a_count() -> None:
    mine = artifact()
    mine.fallback = 0b10
    with pytest.warns(UserWarning, match="lag"):
        assert not mine.decide(1, 0, {"lag": float("nan"), "match_mean": 0.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mine.decide(2, 0, {"lag": 1.0})
    assert mine.fallbacks == 2


def test_a_cut_is_worth_none_or_a_number() -> None:
    assert make_cut("none", None, None) == Cut("none") and make_cut("-2.5", None, None) == Cut("score", log_s=-2.5)
    for bad, complaint in (("worth", "--latency"), ("best", "'best'")):
        with pytest.raises(ScheduleError, match=complaint):
            make_cut(bad, None, None)


def test_the_scheduler_imports_neither_torch_nor_another_stage() -> None:
    code = (
        "import sys, treegraft.runtime.scheduler; "
        "heavy = {'torch', 'transformers', 'sklearn', 'lightgbm', 'pyarrow', 'numpy'} & set(sys.modules); "
        "others = ('treegraft.collect', 'treegraft.value', 'treegraft.distill'); "
        "stages = [m for m in sys.modules if m.startswith(others)]; "
        "sys.exit(str(heavy or stages) if heavy or stages else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
