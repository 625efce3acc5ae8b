"""The value model: its states and worths by hand, a planted signal, cross-validation, determinism, its folder."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from log_fixture import COSTLY, PLANTED, PLANTED_PROFILE, planted_log, random_log, write_log

from treegraft.data.log import LogError, read_log
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.scheduler import Mask, Rule, Rules
from treegraft.runtime.signals import LOGGED
from treegraft.runtime.size import Cut
from treegraft.value_system.replay import (
    NAMES,
    TRAJECTORY,
    all_leaves,
    best_mask,
    fixed_point,
    flatten,
    lag_ms,
    replay,
)
from treegraft.value_system.value import (
    CONTEXT,
    FitError,
    ValueModel,
    backward,
    features,
    fit_value,
    leaf_worth,
    load_value,
    onward,
    path,
    score_calibration,
    states_of,
)

BEST = Rules((Rule(1, (("root_match", ">", 2.0),)),), ("root_match",))
DRAFTING = Drafting(depth=3, budget=6)
CUT = Cut("worth", 0.05, COSTLY)


def speed(answers, schedule) -> float:  # type: ignore[no-untyped-def]
    return fixed_point(answers, schedule, PLANTED_PROFILE, PLANTED)[1].rho


def test_states_inside_a_round_are_those_had_it_stopped_there() -> None:
    log = flatten(random_log(0, (40, 25)))
    run = replay(log, Mask(0b010), CUT, COSTLY, DRAFTING)
    states = states_of(log, run)
    seen = np.zeros(len(log.position), bool)
    for index in (0, 1):
        history: list[int] = []
        mine = np.flatnonzero(run.trace["answer"] == index)
        for i in mine:
            position, lag, accepted, q = (int(run.trace[n][i]) for n in ("position", "lag", "accepted", "q"))
            called = run.trace["tokens"][i].any()
            for stopped in range(-1, accepted):  # -1: the round's own start
                row = log.first[index] + position + stopped + 1
                if position + stopped + 1 >= log.answers[index].length - 1:
                    break
                kept = [*history, stopped] if stopped >= 0 else history
                expected = lag if stopped < 0 else (stopped - min(stopped, q) if called else lag + 1 + stopped)
                assert states.lag[row] == expected
                last = kept[-4:]
                by_name = {"lag": expected, "accepted_last": kept[-1] if kept else 0,
                           "accepted_mean4": sum(last) / len(last) if last else 0}  # fmt: skip
                assert states.values[row].tolist() == [by_name[name] for name in TRAJECTORY]
                seen[row] = True
            history.append(accepted)
    assert seen.all()
    starts = np.zeros(len(log.position), bool)
    starts[log.first[run.trace["answer"]] + run.trace["position"]] = True
    assert np.array_equal(states.weight, np.where(log.remaining > 3, np.where(starts, 1.0, 0.2), 0.0))
    last = np.zeros(len(log.answers), int)
    np.maximum.at(last, run.trace["answer"], run.trace["position"])
    # Every round calls, so a call follows every round but an answer's last.
    assert np.array_equal(states.later, log.position < last[log.answer])


def test_whether_a_call_follows_is_counted_on_policy() -> None:
    log = flatten(random_log(0, (40, 25)))
    assert not states_of(log, replay(log, Mask(0), CUT, COSTLY, DRAFTING)).later.any()
    run = replay(log, BEST, CUT, COSTLY, DRAFTING)
    called = [run.trace["position"][(run.trace["answer"] == i) & (run.trace["mask"] > 0)].max() for i in range(2)]
    assert min(called) > 0 and max(called) < 39
    assert np.array_equal(states_of(log, run).later, log.position < np.array(called)[log.answer])


def test_the_worth_of_a_leaf_by_hand() -> None:
    log, rho = flatten(random_log(1, (12,))), 0.08
    run = replay(log, Mask(0b001), CUT, COSTLY, DRAFTING)
    states = states_of(log, run)
    states.later[:] = 0.4
    leaves = all_leaves(log, CUT, COSTLY)
    masks = np.arange(11) % 8
    worth = leaf_worth(log, leaves, states, masks, rho, COSTLY)
    answer = log.answers[0]
    for t in range(11):
        for mask in range(8):
            context, lag = answer.prompt_length + t, int(states.lag[t])
            counts = [int(c) for c in answer.tokens[t, mask]]
            first = next((c for c in counts if c), 0)
            accepted = int((answer.ranks[t, mask] < leaves.kept[t, mask]).sum())
            ms = float(COSTLY.target(leaves.kept[t, mask] + 1, context)) + COSTLY.round_ms
            ms += mask.bit_count() * COSTLY.medium_step_ms + (3 - mask.bit_count()) * COSTLY.small_step_ms
            ms += sum(float(COSTLY.medium(c, context)) for c in counts if c)
            if first:
                ms += COSTLY.medium_first_ms + float(
                    COSTLY.medium(lag + first, context) - COSTLY.medium(first, context)
                )
            left = accepted - min(accepted, answer.q[t, mask]) if first else lag + 1 + accepted
            debt = float(COSTLY.medium(left + 1, context) - COSTLY.medium(1, context))
            emitted = min(accepted + 1, 11 - t)
            after, landing = 0.0, t + accepted + 1
            if landing >= 11:
                debt = 0.0
            while landing < 11:  # the rounds to come, lag aside
                later = masks[landing]
                after += int(leaves.emitted[landing, later]) - rho * float(leaves.ms[landing, later])
                landing += int(leaves.accepted[landing, later]) + 1
            assert worth[t, mask] == pytest.approx(emitted - rho * (ms + 0.4 * debt) + after)


def test_backward_induction_follows_its_own_decisions() -> None:
    log = flatten(random_log(2, (9,)))
    worth = np.random.default_rng(0).normal(size=log.q.shape)
    margins = backward(log, worth, lambda step, margin: margin > 0)
    best = path([margin > 0 for margin in margins])[-1]
    # With decisions by the true margins, every position reaches its best leaf, and step 1 weighs the best of each half.
    assert np.array_equal(best, worth.argmax(axis=1))
    halves = worth.reshape(len(worth), 4, 2).max(axis=1)
    np.testing.assert_allclose(margins[0][:, 0], halves[:, 1] - halves[:, 0])


def test_features_before_a_step_are_what_a_live_round_would_read() -> None:
    log = flatten(random_log(3, (10,)))
    states = states_of(log, replay(log, Mask(0), CUT, COSTLY, DRAFTING))
    values = features(log, states, 3).reshape(9, 4, len(NAMES))
    assert np.array_equal(values[:, :, NAMES.index("mask")], np.tile(np.arange(4), (9, 1)))
    lag = values[:, :, NAMES.index("lag")]
    assert np.array_equal(lag[:, 0], states.lag) and not lag[:, 1:].any()  # 0 after a call in the round


@pytest.mark.parametrize("kind", ["lightgbm", "linear"])
def test_a_planted_signal_is_found(kind: str) -> None:
    train, test = planted_log(0), planted_log(1)
    model = ValueModel(kind).fit(train, PLANTED_PROFILE, PLANTED)
    assert model.ranking()[0] == "root_match"
    learned = replay(test, model, Cut("worth", model.rho_, PLANTED_PROFILE), PLANTED_PROFILE, PLANTED).rho
    mask = speed(test, Mask(best_mask(train, PLANTED_PROFILE, PLANTED)))
    assert speed(test, BEST) > 1.1 * mask
    assert learned > 0.97 * speed(test, BEST)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict]:
    """A log with a planted signal, its value folder, and the fit's report."""
    folder = tmp_path_factory.mktemp("value")
    write_log(folder / "log", planted_log(0), PLANTED)
    return folder / "log", folder / "value", fit_value(folder / "log", PLANTED_PROFILE, folder / "value")


def test_a_written_log_reads_back(fitted) -> None:
    for ours, read in zip(planted_log(0), read_log(fitted[0])[1], strict=True):
        for name, value in asdict(ours).items():
            assert np.array_equal(getattr(read, name), value), name


def test_the_smallest_sufficient_set_is_selected(fitted) -> None:
    report = fitted[2]
    assert report["signals"] == [*CONTEXT, "root_match"]
    held_out = {name: figure.get("speedup") for name, figure in report["cross_validated"].items()}
    assert held_out["value model"] > 1.1 * held_out["best mask"] > 1.1 * held_out["small"]
    assert held_out["oracle over masks and cuts"] >= held_out["oracle over masks"] >= held_out["value model"]
    low, high = report["cross_validated"]["value model over best mask"]["interval"]
    assert 1 < low < high
    assert sum(report["importance"]["root_match"]) > 0
    top = report["calibration"][-1]
    assert top["predicted"] > 0 and top["realised"] > 0


def test_the_targets_uncertainty_has_to_earn_its_pass_over_the_vocabulary(tmp_path: Path) -> None:
    answers = planted_log(0)
    told, noise = LOGGED.index("root_match"), LOGGED.index("target_entropy")
    for answer in answers:
        answer.signals[:, :, [told, noise]] = answer.signals[:, :, [noise, told]]
    log = write_log(tmp_path / "log", answers, PLANTED)
    cheap, dear = (
        fit_value(log, replace(PLANTED_PROFILE, uncertainty_ms=ms), tmp_path / f"value-{ms}") for ms in (0.01, 2.0)
    )
    assert "target_entropy" in cheap["signals"]
    assert "target_entropy" not in dear["signals"] and "target_entropy" in dear["importance"]
    assert load_value(tmp_path / "value-2.0").model.reads == dear["signals"]


def test_a_fit_is_the_same_again(fitted, tmp_path: Path) -> None:
    fit_value(fitted[0], PLANTED_PROFILE, tmp_path / "again")
    files = sorted(path.relative_to(fitted[1]) for path in fitted[1].rglob("*") if path.is_file())
    assert len(files) > 10
    for name in files:
        assert (tmp_path / "again" / name).read_bytes() == (fitted[1] / name).read_bytes(), name


def test_a_value_folder_reads_back(fitted) -> None:
    value = load_value(fitted[1])
    test = planted_log(1)
    cut = Cut("worth", value.model.rho_, value.profile)
    again = replay(test, value.model, cut, value.profile, value.drafting)
    assert again.rho > 0.97 * speed(test, BEST)
    tested = [answer.prompt for fold, _ in value.folds for answer in fold.test.answers]
    assert sorted(tested) == sorted(answer.prompt for answer in value.answers)
    assert all(len(fold.train.answers) + len(fold.test.answers) == len(value.answers) for fold, _ in value.folds)


def test_a_linear_model_reads_back_too(fitted, tmp_path: Path) -> None:
    report = fit_value(fitted[0], PLANTED_PROFILE, tmp_path / "linear", kind="linear")
    value = load_value(tmp_path / "linear")
    log = flatten(value.answers)
    direct = ValueModel("linear", signals=report["signals"])
    assert direct.reads == value.model.reads
    assert np.isfinite(
        value.model.margins(log, states_of(log, replay(log, Mask(1), Cut("none"), value.profile, PLANTED)))[0]
    ).all()


def test_a_log_that_changed_is_refused(fitted, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log", planted_log(0, prompts=4), PLANTED)
    fit_value(log, PLANTED_PROFILE, tmp_path / "value")
    manifest = json.loads((log / "manifest.json").read_text())
    (log / "manifest.json").write_text(json.dumps({**manifest, "failed": ["x"]}))
    with pytest.raises(FitError, match="has changed since this was fitted"):
        load_value(tmp_path / "value")
    (tmp_path / "other").mkdir()
    other = write_log(tmp_path / "other" / "log", random_log(0, (9, 8)), DRAFTING)
    log.rename(tmp_path / "old")
    other.rename(log)
    with pytest.raises(FitError, match=r"K = 2, but .* now has K = 3"):
        load_value(tmp_path / "value")
    with pytest.raises(FitError, match="not a value folder"):
        load_value(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("all/step-1.txt", lambda text: text[: len(text) // 2]),
        ("fold-0/step-1.txt", lambda _: None),
        ("latency.json", lambda text: text.replace("0.6", "0.01")),
        ("value.json", lambda text: text.replace('"seed": 0', '"seed": 5')),
        ("value.json", lambda _: "[]"),
    ],
)
def test_a_damaged_value_folder_is_refused_by_the_file_at_fault(fitted, tmp_path: Path, name: str, damage) -> None:
    folder = shutil.copytree(fitted[1], tmp_path / "value")
    damaged = damage((folder / name).read_text())
    (folder / name).unlink() if damaged is None else (folder / name).write_text(damaged)
    with pytest.raises(FitError, match="version None" if damaged == "[]" else f"{name}: .*altered since the fit"):
        load_value(folder)


def test_what_cannot_be_fitted_says_why(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log", planted_log(0, prompts=1), PLANTED)
    with pytest.raises(FitError, match="holds one prompt"):
        fit_value(log, PLANTED_PROFILE, tmp_path / "value")
    short = write_log(tmp_path / "short", planted_log(0, prompts=2, length=4), PLANTED)
    with pytest.raises(FitError, match="no answer is longer than 4 tokens"):
        fit_value(short, PLANTED_PROFILE, tmp_path / "value")
    with pytest.raises(FitError, match=r"manifest\.json is a file; give a folder"):
        fit_value(log, PLANTED_PROFILE, log / "manifest.json")
    with pytest.raises(ValueError, match="--model 'forest'"):
        ValueModel("forest").fit(planted_log(0, prompts=2), PLANTED_PROFILE, PLANTED)
    manifest = json.loads((log / "manifest.json").read_text())
    (log / "manifest.json").write_text(json.dumps({**manifest, "signals": ["step"]}))
    with pytest.raises(LogError, match="other signals"):
        fit_value(log, PLANTED_PROFILE, tmp_path / "value")


def test_onward_worth_is_what_the_rounds_to_come_bring() -> None:
    log = flatten(random_log(4, (14, 9)))
    leaves, rho = all_leaves(log, CUT, COSTLY), 0.05
    worth = onward(log, leaves, np.full(len(log.position), 5), rho)
    run = replay(log, Mask(5), CUT, COSTLY, DRAFTING)
    for index, answer in enumerate(log.answers):
        mine = run.trace["answer"] == index
        lags = sum(
            float(lag_ms(COSTLY, lag, tokens[tokens > 0][0], answer.prompt_length + position))
            for lag, tokens, position in zip(*(run.trace[name][mine] for name in ("lag", "tokens", "position")))
        )
        whole = answer.length - 1 - rho * (run.decode_ms[index] - lags)
        assert worth[log.first[index]] == pytest.approx(whole)


def test_scores_are_held_against_what_is_accepted(fitted) -> None:
    log = flatten(planted_log(0))
    medium = score_calibration(log)["medium"]
    counted = log.remaining > 2
    accepted = (log.ranks[counted, 3] < 4).sum()
    assert sum(part["nodes"] for part in medium) == 2 * counted.sum()
    assert sum(part["nodes"] * part["accepted"] for part in medium) == pytest.approx(accepted)
    assert (medium[0]["s"], medium[-1]["s"]) == pytest.approx((np.exp(-0.2), np.exp(-0.1)))


def test_the_report_names_the_signal_that_was_selected_and_the_releases_share(fitted) -> None:
    page = (fitted[1] / "report.html").read_text()
    assert (
        "0 of 6 were selected (none)" in page
        and "root_match" in page
        and "http" not in page.replace('xmlns="http://www.w3.org/2000/svg"', "")
    )
    assert page.count("<svg") == 8


def test_the_report_says_how_many_nodes_are_verified(fitted) -> None:
    # Under a flat profile every node there is pays: two after a call at step 1, none without one.
    verified, calls = fitted[2]["verified"], fitted[2]["calls"]
    assert set(verified) == {"f0", "f1", "overall"}
    for name, sizes in verified.items():
        assert sizes["mean"] == pytest.approx(2 * calls[name][0], abs=0.01) and sizes["at_budget"] == 0
    assert "nodes are verified" in (fitted[1] / "report.html").read_text()


def test_the_models_masks_are_those_of_its_margins() -> None:
    log = flatten(planted_log(4, prompts=4))
    model = ValueModel().fit(log, PLANTED_PROFILE, PLANTED)
    margins = model.margins(log, model.states_)
    assert np.array_equal(model.masks(log, model.states_), path([margin > 0 for margin in margins])[-1])


def test_metrics_are_the_value_models_until_something_ships(fitted) -> None:
    metrics = json.loads((fitted[1] / "metrics.json").read_text())
    assert metrics["schedule"] == "value model" and set(metrics["by_file"]) == {"f0", "f1"}
    for name, figure in metrics["overall"].items():
        parts = [metrics["by_file"][file][name]["value"] for file in ("f0", "f1")]
        assert figure["value"] == pytest.approx(sum(parts) / 2)
        assert figure["interval"][0] <= figure["value"] <= figure["interval"][1]
    assert metrics["overall"]["gain_over_best_fixed"]["value"] > 0.1
    assert 0.3 < metrics["overall"]["oracle_gap_share"]["value"] < 1
