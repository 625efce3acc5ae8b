"""Latency profiles are fitted monotone, kept as JSON, and refused by name where they are damaged (spec section 6)."""

import json
from pathlib import Path

import numpy as np
import pytest

from treegraft.runtime.latency import STEP_TIMES, Curve, LatencyProfile, ProfileError, fit_curve

TRUE = Curve((1, 2, 4, 8, 16, 32), (10.0, 11.0, 11.5, 16.0, 30.0, 55.0), 0.01, 0.0005)
PROFILE = LatencyProfile(TRUE, Curve((1, 9), (4.0, 6.5)), 0.1, 0.2, 0.3, "somewhere", 0.4, 0.5)


def measured(noise: float = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens, context = (grid.ravel().astype(float) for grid in np.meshgrid(TRUE.tokens, (0, 50, 200, 800)))
    factor = 1 + noise * np.random.default_rng(0).standard_normal(len(tokens))
    return tokens, context, TRUE(tokens, context) * factor


def test_a_fit_recovers_the_curve_that_made_the_measurements() -> None:
    fitted = fit_curve(*measured())
    assert fitted.tokens == TRUE.tokens
    assert fitted.ms == pytest.approx(TRUE.ms, rel=1e-3)
    assert fitted.context_ms == pytest.approx(TRUE.context_ms, rel=1e-2)
    assert fitted.context_token_ms == pytest.approx(TRUE.context_token_ms, rel=1e-2)


def test_a_fit_of_noisy_measurements_is_close_and_monotone() -> None:
    fitted = fit_curve(*measured(noise=0.1))
    tokens, context, ms = measured()
    assert np.abs(fitted(tokens, context) / ms - 1).max() < 0.2
    sizes = np.arange(1, 65)
    for at in (0, 100, 1000):
        assert (np.diff(fitted(sizes, at)) >= 0).all()
    assert (np.diff(fitted(8, np.arange(0, 1000, 50))) >= 0).all()


def test_measurements_that_fall_give_a_flat_curve() -> None:
    tokens = np.array([1.0, 2.0, 4.0])
    fitted = fit_curve(tokens, np.zeros(3), np.array([12.0, 10.0, 11.0]))
    assert (np.diff(fitted.ms) >= 0).all()
    assert 10 <= fitted.ms[0] <= fitted.ms[-1] <= 12


def test_a_curve_is_linear_between_and_beyond_its_points() -> None:
    curve = Curve((1, 3, 5), (1.0, 2.0, 4.0), context_ms=0.1, context_token_ms=0.01)
    assert curve([1, 2, 3, 4, 5, 7], 0).tolist() == [1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert float(curve(2, 10)) == pytest.approx(1.5 + 10 * (0.1 + 0.02))
    assert Curve((1,), (2.0,))([1, 9], 0).tolist() == [2.0, 2.0]


def test_the_what_if_profile_costs_one_a_round_and_r_a_call() -> None:
    assumed = LatencyProfile.what_if(0.6)
    assert assumed.target([1, 60], [0, 900]).tolist() == [1.0, 1.0]
    assert assumed.medium([1, 60], [0, 900]).tolist() == [0.6, 0.6]
    assert {getattr(assumed, name) for name in STEP_TIMES} == {0}


def test_a_rounds_calls_catch_up_once_and_find_cold_weights_once() -> None:
    assert PROFILE.calls_ms([0, 0, 0], 5, 100) == 0
    medium = PROFILE.medium
    assert PROFILE.calls_ms([0, 2, 3], 5, 100) == pytest.approx(float(medium(7, 100) + medium(3, 100)) + 0.4)


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    assert LatencyProfile.load(path) == PROFILE
    fitted = LatencyProfile(fit_curve(*measured(0.1)), fit_curve(*measured()))
    fitted.save(path)
    assert LatencyProfile.load(path) == fitted


def changed(**fields: object) -> str:
    data = json.loads(json.dumps(PROFILE, default=vars))
    return json.dumps({**data, **fields})


CURVE = {"tokens": [1, 2], "ms": [1.0, 2.0], "context_ms": 0.0, "context_token_ms": 0.0}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("not json", "cannot be read"),
        ("[1, 2]", "not a latency profile"),
        ('"text"', "not a latency profile"),
        ("{}", "target"),
        (changed(medium=None), "medium"),
        (changed(medium=3), "medium"),
        (changed(target={"tokens": [1]}), "ms"),
        (changed(extra=1), "extra"),
        (changed(target={**CURVE, "extra": 1}), "extra"),
        (changed(target={**CURVE, "tokens": [2, 1]}), "target"),
        (changed(target={**CURVE, "tokens": [1]}), "target"),
        (changed(target={**CURVE, "tokens": [], "ms": []}), "target"),
        (changed(target={**CURVE, "tokens": ["a", "b"]}), "target"),
        (changed(medium={**CURVE, "ms": [1.0, -2.0]}), "medium"),
        (changed(medium={**CURVE, "ms": ["a", "b"]}), "medium"),
        (changed(medium={**CURVE, "ms": [1.0, float("nan")]}), "medium"),
        (changed(medium={**CURVE, "ms": 3}), "medium"),
        (changed(medium={**CURVE, "context_ms": float("inf")}), "medium"),
        (changed(medium={**CURVE, "context_ms": None}), "medium"),
        (changed(small_step_ms="a"), "small_step_ms"),
        (changed(round_ms=-1.0), "round_ms"),
        (changed(medium_step_ms=float("nan")), "medium_step_ms"),
        (changed(medium_first_ms=-0.1), "medium_first_ms"),
        (changed(decision_ms=None), "decision_ms"),
        (changed(uncertainty_ms=-1.0), "uncertainty_ms"),
        (changed(medium={**CURVE, "ms": [2.0, 1.0]}), "medium needs times that do not fall"),
        (changed(target={**CURVE, "ms": [0.0, 1.0]}), "target needs times above 0"),
        (changed(target={**CURVE, "ms": [True, 2.0]}), "target"),
        (changed(target={**CURVE, "tokens": [1, 10**400]}), "target"),
        (changed(machine=5), "machine"),
        (changed(machine="two\nlines"), "machine"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_a_damaged_profile_is_refused_with_its_file_and_the_fault(tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "bad-profile.json"
    path.write_text(content)
    with pytest.raises(ProfileError, match=f"bad-profile.json: .*{named}"):
        LatencyProfile.load(path)


def test_a_missing_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"absent\.json: cannot be read"):
        LatencyProfile.load(tmp_path / "absent.json")


def test_a_curve_of_integers_beyond_64_bits_still_gives_times():
    assert float(Curve((1, 2**64), (1.0, 2.0))(1, 0)) == 1.0
