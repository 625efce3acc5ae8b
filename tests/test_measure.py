"""A latency profile is of the machine at one pace, though its pace changes while it is measured."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from treegraft.runtime import measure
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.latency import Curve

TARGET = Curve((1, 2, 4, 8, 16, 64), (50.0, 60.0, 75.0, 85.0, 100.0, 160.0), 0.004, 0.0005)
MEDIUM = Curve((1, 64), (7.0, 12.0), 0.001, 0.0)
COLD = 1.5


class Machine:
    """Runs nothing, but says what each forward would take: 1.8 times as long from the 200th to the 500th."""

    def __init__(self) -> None:
        self.runs = 0
        self.last: object = None

    def runner(self, model: SimpleNamespace, context: int) -> SimpleNamespace:
        return SimpleNamespace(run=lambda size: self.run(model, context, size))

    def run(self, model: SimpleNamespace, context: int, size: int) -> float:
        self.runs += 1
        cold = COLD if model.curve is MEDIUM and self.last is not MEDIUM else 0.0
        self.last = model.curve
        return float(model.curve(size, context) + cold) * (1.8 if 200 < self.runs < 500 else 1.0)


def test_a_change_of_pace_while_it_is_measured_bends_no_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_Runner", Machine().runner)
    models = [SimpleNamespace(curve=curve, context=2048) for curve in (TARGET, MEDIUM)]
    target, medium, first_ms = measure._curves(*models)
    sizes = np.arange(1, 64)
    pace = float(target(1, 256) / TARGET(1, 256))
    for context in (32, 256, 768):
        np.testing.assert_allclose(target(sizes, context) / TARGET(sizes, context), pace, rtol=0.03)
        np.testing.assert_allclose(medium(sizes, context) / MEDIUM(sizes, context), pace, rtol=0.03)
    assert first_ms / COLD == pytest.approx(pace, rel=0.03)


def test_a_profile_of_real_models_is_monotone_and_positive(pair) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair("llama")
    profile = measure.measure_profile(target, medium, list(range(3, 40)), Drafting(depth=2, width=2, children=2))
    sizes = np.arange(1, 64)
    for curve in (profile.target, profile.medium):
        assert (curve(sizes, 100) > 0).all() and (np.diff(curve(sizes, 100)) >= 0).all()
    assert profile.round_ms > 0 and profile.small_step_ms > 0 and profile.medium_first_ms >= 0


def test_a_context_too_short_to_be_measured_is_named(pair) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair("llama")
    with pytest.raises(ValueError, match=r"short: its context of 64 tokens .* takes 96"):
        measure.measure_profile(target, replace(medium, name="short", context=64), list(range(3, 40)), Drafting())
