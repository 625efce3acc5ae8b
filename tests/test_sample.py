"""Logs larger than a fit needs: what is fitted, what is left to judge, and that batches change nothing."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from log_fixture import PLANTED, PLANTED_PROFILE, planted_log, write_log

from treegraft.data.log import LogError, read_log, read_manifest
from treegraft.distill.distill import distill
from treegraft.runtime.decode import AUTOREGRESSIVE
from treegraft.runtime.scheduler import Mask
from treegraft.value_system import sample, value
from treegraft.value_system.replay import named_plan, replay, summarise
from treegraft.value_system.value import fit_value, load_value

ROWS = 29 * 3  # decision points of a prompt of `planted_log`: 29 positions, K = 2


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log", planted_log(0), PLANTED)


def test_a_log_within_the_bound_is_fitted_whole(log: Path) -> None:
    fitted, left = sample.divide(manifest := read_manifest(log), 0, 12 * ROWS)
    assert (fitted, left) == (manifest["parts"], [])


def test_of_a_larger_log_random_prompts_are_fitted_and_the_others_left(log: Path) -> None:
    manifest = read_manifest(log)
    fitted, left = sample.divide(manifest, 0, 7 * ROWS + 5)
    assert (len(fitted), len(left)) == (7, 5)
    assert sorted(part["prompt"] for part in fitted + left) == sorted(part["prompt"] for part in manifest["parts"])
    assert sample.divide(manifest, 0, 7 * ROWS + 5) == (fitted, left)
    assert sample.divide(manifest, 1, 7 * ROWS + 5) != (fitted, left)


def test_a_fit_gets_two_prompts_however_large_they_are(log: Path) -> None:
    fitted, left = sample.divide(read_manifest(log), 0, 1)
    assert (len(fitted), len(left)) == (2, 10)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m["drafting"].update(depth="2"), "damaged or altered"),
        (lambda m: m["drafting"].pop("depth") and m["drafting"].update(deep=2), "damaged or altered"),
        (lambda m: m["drafting"].update(depth=1), "more than the 1 of manifest"),
        (lambda m: m["drafting"].update(budget=1), "more than the 1 of manifest"),
        (lambda m: m["parts"].append(m["parts"][0]), "names a prompt or a file twice"),
        (lambda m: m["parts"][0].pop("prompt"), "damaged or altered"),
        (lambda m: m["parts"][0].update(lengths=[]), "not what manifest.json says"),
        (lambda m: m["parts"][0].update(lengths=[[300, 30]]), "not what manifest.json says"),
        (lambda m: m["parts"][0]["leaves"].update(file="../leaves-000000.parquet"), "altered, it names"),
        (lambda m: m["parts"][0].update(prompt="another"), "not what manifest.json says"),
    ],
)
def test_a_manifest_that_its_parts_contradict_is_refused(log: Path, change: Callable, said: str) -> None:
    manifest = json.loads((log / "manifest.json").read_text())
    change(manifest)
    (log / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(LogError, match=said):
        read_log(log)


def test_judging_batch_by_batch_says_what_one_replay_of_all_says(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, answers = read_log(log)
    plans = [named_plan(f"{mask:#04b}", Mask(mask), answers, PLANTED_PROFILE, PLANTED) for mask in (0, 1)]
    whole = [replay(answers, plan.schedule, plan.cut, PLANTED_PROFILE, plan.drafting).records(plan.name)
             for plan in (AUTOREGRESSIVE, *plans)]  # fmt: skip
    monkeypatch.setattr(sample, "BATCH", 2 * ROWS)
    judged = sample.judge(log, manifest, manifest["parts"], plans, PLANTED_PROFILE)
    assert judged == summarise([record for records in whole for record in records])


def test_batches_hold_every_part_once_and_no_more_rows_than_asked(log: Path) -> None:
    parts = read_manifest(log)["parts"]
    found = list(sample.batches(parts, 5 * ROWS))
    assert [len(batch) for batch in found] == [5, 5, 2]
    assert [part for batch in found for part in batch] == parts
    assert len(list(sample.batches(parts, 1))) == len(parts)


def test_an_artifact_of_a_large_log_is_judged_on_the_prompts_that_were_not_fitted(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(value, "FITTED", 7 * ROWS)
    report = fit_value(log, PLANTED_PROFILE, tmp_path / "value")
    assert (report["log"]["fitted_prompts"], report["log"]["left_prompts"]) == (7, 5)
    back = load_value(tmp_path / "value")
    assert {a.prompt for a in back.answers}.isdisjoint(part["prompt"] for part in back.left)
    made = distill(tmp_path / "value", tmp_path / "scheduler.json", kind="rules")
    left = json.loads((tmp_path / "value" / "metrics.json").read_text())["left_prompts"]
    assert left["overall"]["artifact"]["tokens"] == 5 * 30
    assert "Prompts of the log that were not fitted" in made["summary"]


def test_an_altered_part_is_found_even_if_only_judged_by(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(value, "FITTED", 7 * ROWS)
    fit_value(log, PLANTED_PROFILE, tmp_path / "value")
    altered = log / load_value(tmp_path / "value").left[0]["leaves"]["file"]
    altered.write_bytes(altered.read_bytes()[:-1])
    with pytest.raises(LogError, match=altered.name):
        distill(tmp_path / "value", tmp_path / "scheduler.json", kind="rules")
