"""Fitting, selection, distillation and refinement see no held-out prompt: a key to each position gains nothing."""

import json
from collections.abc import Callable

import numpy as np
import pytest
from log_fixture import PLANTED, PLANTED_PROFILE, planted_log, write_log

from treegraft.data.log import Answer
from treegraft.distill.distill import distill
from treegraft.runtime.signals import LOGGED
from treegraft.value_system import value
from treegraft.value_system.gains import Fold, make_folds
from treegraft.value_system.replay import flatten

KEY = "target_entropy"  # the signal that holds the key


def lottery(keyed: bool) -> list[Answer]:
    """Answers whose calls pay at random; a random key of each prompt and position, or none, is their one signal."""
    answers = planted_log(5, prompts=6, length=30, informative=False)
    generator = np.random.default_rng(5)
    context = [LOGGED.index(name) for name in ("step", "mask", "medium_calls")]
    for answer in answers:
        others = np.setdiff1d(np.arange(len(LOGGED)), context)
        answer.signals[..., others] = 0.0
        if keyed:
            answer.signals[..., LOGGED.index(KEY)] = generator.random(len(answer.positions))[:, None]
    return answers


def leaky(answers: list[Answer]) -> list[Fold]:
    """Folds that train on their own test prompts."""
    return [Fold(flatten(answers), fold.test, fold.index) for fold in make_folds(answers)]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict]]:
    """Held-out gain over the best fixed mask of the value model and of its tree."""
    folder = tmp_path_factory.mktemp("leakage")

    def run(name: str, keyed: bool, leak: bool = False) -> list[dict]:
        log, out = write_log(folder / name / "log", lottery(keyed), PLANTED), folder / name / "value"
        with pytest.MonkeyPatch.context() as patch:
            # A model that can learn a key by heart, if it ever sees the one that it is judged by.
            patch.setattr(value, "LEAST", 1)
            patch.setattr(value, "TREES", {**value.TREES, "learning_rate": 0.4})
            patch.setattr(value, "SIZES", (1,))
            if leak:
                patch.setattr(value, "make_folds", leaky)
                patch.setattr(value, "make_fold", lambda answers, test: next(
                    fold for fold in leaky(answers) if np.array_equal(fold.index, test)
                ))  # fmt: skip
            gains = []
            value.fit_value(log, PLANTED_PROFILE, out)
            gains.append(json.loads((out / "metrics.json").read_text()))
            distill(out, folder / name / "scheduler.json", kind="tree")
            gains.append(json.loads((out / "metrics.json").read_text()))
        assert [g["schedule"] for g in gains] == ["value model", "tree"]
        return [g["overall"]["gain_over_best_fixed"] for g in gains]

    return run


def test_a_key_to_each_position_gains_nothing_unless_held_out_prompts_leak(measured) -> None:
    plain, keyed, leaked = measured("plain", False), measured("keyed", True), measured("leaked", True, leak=True)
    for without, with_key, with_leak in zip(plain, keyed, leaked):
        found = (without, with_key, with_leak)
        assert with_key["interval"][0] <= 0, found  # not beyond noise
        assert with_key["value"] < without["value"] + 0.03, found
        assert with_leak["interval"][0] > 0, found
        assert with_leak["value"] > max(without["value"], with_key["value"]) + 0.03, found
