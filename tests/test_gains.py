"""Gains by hand, their folds, and the profile named on the command line."""

from dataclasses import replace

import numpy as np
import pytest
from log_fixture import COSTLY, random_log

from treegraft import cli
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.latency import LatencyProfile
from treegraft.runtime.scheduler import Mask
from treegraft.runtime.size import Cut
from treegraft.value_system.gains import (
    MEASURES,
    Rivals,
    choose_by_others,
    fastest,
    gains,
    make_folds,
    prompt_groups,
    rivals,
)
from treegraft.value_system.replay import best_mask, fixed_point, oracle, replay

DRAFTING = Drafting(depth=3, budget=6)


def test_gains_are_those_of_each_benchmark_and_their_plain_mean() -> None:
    # f0 has two prompts (p0, p2), f1 one, much longer (p1).
    answers = random_log(0, (11, 101, 21))
    against = Rivals(
        small=np.array([20.0, 100.0, 20.0]), medium=np.array([40.0, 80.0, 40.0]),
        best_fixed=np.array([20.0, 100.0, 20.0]), best_fixed_hindsight=np.array([40.0, 80.0, 40.0]),
        oracle_masks=np.array([8.0, 40.0, 8.0]), oracle=np.array([8.0, 40.0, 8.0]), mask=7,
    )  # fmt: skip
    found = gains(answers, np.array([16.0, 80.0, 16.0]), against)
    # Tokens per ms: f0 1 against small .8, medium .4; f1 1.26 against 1.01 and 1.26.
    assert [found["by_file"]["f0"][name]["value"] for name in MEASURES] == pytest.approx([0.25, 0.25, 1.5, 1 / 6])
    assert [found["by_file"]["f1"][name]["value"] for name in MEASURES] == pytest.approx([0, 0.25, 0, 1 / 6])
    assert [found["overall"][name]["value"] for name in MEASURES] == pytest.approx([0.125, 0.25, 0.75, 1 / 6])
    # Both f0 prompts gain alike, f1 has one prompt: no spread is left.
    assert found["overall"]["gain_over_better_endpoint"]["interval"] == pytest.approx([0.125, 0.125])


def test_where_the_oracle_leaves_nothing_the_share_is_zero() -> None:
    answers, same = random_log(0, (11, 11)), np.array([10.0, 10.0])
    found = gains(answers, same, Rivals(same, same, same, same, same, same, 0))
    assert all(figure == {"value": 0.0, "interval": [0.0, 0.0]} for figure in found["overall"].values())


def test_the_best_fixed_mask_is_chosen_on_other_prompts_and_beside_it_in_hindsight() -> None:
    answers = random_log(1, (30, 25, 20, 35, 15))
    answers[3] = replace(answers[3], prompt="p0", file="f0", turn=1)
    folds = list(make_folds(answers))
    groups = prompt_groups(answers)
    assert groups.tolist() == [0, 1, 2, 0, 3]
    assert sorted(np.concatenate([fold.index for fold in folds]).tolist()) == [0, 1, 2, 3, 4]
    assert any({0, 3} <= set(fold.index.tolist()) for fold in folds)  # the turns of a prompt stay together
    found = rivals(answers, folds, COSTLY, DRAFTING)
    for fold in folds:
        mask = Mask(best_mask(fold.train, COSTLY, DRAFTING))
        rho, _ = fixed_point(fold.train, mask, COSTLY, DRAFTING)
        run = replay(fold.test, mask, Cut("worth", rho, COSTLY), COSTLY, DRAFTING)
        assert found.best_fixed[fold.index].tolist() == run.ms.tolist()
    _, run = fixed_point(answers, Mask(found.mask), COSTLY, DRAFTING)
    assert found.mask == best_mask(answers, COSTLY, DRAFTING)
    assert found.best_fixed_hindsight.tolist() == run.ms.tolist()
    bound = oracle(answers, Cut("none"), COSTLY).cuts_ms + (run.ms - run.decode_ms)
    assert found.oracle.tolist() == pytest.approx(bound.tolist())


@pytest.mark.parametrize(
    "text", ["r=0", "r=x", "r", "0.3", "t_tgt=82", "r=0.3,t_mid=2", "r=inf", "r=1e30", "r=0.3,r=0.5", ""]
)
def test_a_what_if_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="numbers from 1e-6 to 1e6"):
        cli._priced(None, text)


def test_a_what_if_is_flat_and_free_but_for_its_calls(tmp_path) -> None:
    assert cli._priced(None, "r=0.3") == LatencyProfile.what_if(0.3)
    both = cli._priced(None, "t_tgt=82, t_mid=48")
    assert float(both.target(25, 900)) == 82 and float(both.medium(7, 900)) == 48 and both.round_ms == 0
    with pytest.raises(ValueError, match="one of --latency"):
        cli._priced(tmp_path / "latency.json", "r=0.3")
    with pytest.raises(ValueError, match="one of --latency"):
        cli._priced(None, None)


def test_a_choice_for_a_fold_is_made_without_its_own_answers() -> None:
    answers = random_log(0, (9, 9, 9, 9))
    folds = list(make_folds(answers))
    lucky = np.full(4, 6.0)
    lucky[folds[0].index] = 0.0
    ms = {"lucky": lucky, "steady": np.full(4, 5.0)}
    assert fastest(answers, ms) == "lucky"
    assert choose_by_others(answers, folds, ms, fastest) == ["steady", "lucky", "lucky", "lucky"]
