"""Latency profiles: what a target forward and a medium call cost, by tokens and context, in ms (spec section 6)."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from treegraft.runtime.signals import UNCERTAINTY

MOST = 1e9  # ms, or tokens, that a profile may hold
STEP_TIMES = ("small_step_ms", "medium_step_ms", "round_ms", "medium_first_ms", "decision_ms", "uncertainty_ms")


class Asking(Protocol):
    """A schedule, as far as its decisions take time."""

    @property
    def reads(self) -> Sequence[str]: ...

    def asks(self, step: int) -> bool:
        """Whether a decision at `step` may have to work out a signal."""
        ...


class ProfileError(ValueError):
    """A latency profile that cannot be read; the message names the file and the field."""


@dataclass(frozen=True)
class Curve:
    """A model's time: `ms[i]` for `tokens[i]` tokens (linear between, and beyond the last), plus a part per context.

    Each token of context adds context_ms + context_token_ms * tokens.
    """

    tokens: tuple[int, ...]
    ms: tuple[float, ...]
    context_ms: float = 0.0
    context_token_ms: float = 0.0

    def __call__(self, tokens: Any, context: Any) -> np.ndarray:
        tokens, context = np.asarray(tokens, np.float64), np.asarray(context, np.float64)
        # As floats: an integer beyond 64 bits would make an array of objects.
        base = np.interp(tokens, np.asarray(self.tokens, np.float64), np.asarray(self.ms, np.float64))
        if len(self.tokens) > 1:
            slope = (self.ms[-1] - self.ms[-2]) / (self.tokens[-1] - self.tokens[-2])
            base = base + slope * np.maximum(tokens - self.tokens[-1], 0)
        return base + context * (self.context_ms + self.context_token_ms * tokens)


@dataclass(frozen=True)
class LatencyProfile:
    """T_tgt and T_mid of one machine, and the time per step and round that is not inside a forward, all in ms.

    `medium` is a call that follows another in its round. A round's first call takes `medium_first_ms` more, since the
    target's forward has pushed the drafter's weights out of the processor's caches. `decision_ms` is what a step takes
    more where its drafter is decided by signals, `uncertainty_ms` what a round takes more where the target's
    uncertainty is among them.
    """

    target: Curve
    medium: Curve
    small_step_ms: float = 0.0
    medium_step_ms: float = 0.0
    round_ms: float = 0.0
    machine: str = ""
    medium_first_ms: float = 0.0
    decision_ms: float = 0.0
    uncertainty_ms: float = 0.0

    def deciding(self, schedule: "Asking", depth: int) -> "LatencyProfile":
        """This profile for a schedule over `depth` steps: what it takes to decide by signals goes into round_ms."""
        decisions = sum(schedule.asks(step) for step in range(1, depth + 1))
        uncertainty_ms = 0.0 if set(UNCERTAINTY).isdisjoint(schedule.reads) else self.uncertainty_ms
        return replace(self, round_ms=self.round_ms + decisions * self.decision_ms + uncertainty_ms)

    def calls_ms(self, tokens: list[int], lag: int, context: int) -> float:
        """The forwards of a round's medium calls: `tokens` nodes at each step (0: no call), the first catching up."""
        called = [count for count in tokens if count]
        if not called:
            return 0.0
        called[0] += lag
        return float(self.medium(called, context).sum()) + self.medium_first_ms

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str) -> "LatencyProfile":
        name = "file"
        try:
            curves = {}
            for name in ("target", "medium"):
                fields = dict(data[name])
                curves[name] = Curve(**{**fields, "tokens": tuple(fields["tokens"]), "ms": tuple(fields["ms"])})
            name = "file"
            profile = cls(**{**data, **curves})
        except (KeyError, TypeError, ValueError) as error:
            raise ProfileError(
                f"{where}: not a latency profile ({name}: {error}); make one with `treegraft profile`"
            ) from error
        for name, curve in curves.items():
            times = (*curve.ms, curve.context_ms, curve.context_token_ms)
            paired = len(curve.tokens) == len(curve.ms) > 0
            if not paired or not _sensible((*curve.tokens, *times)) or not np.all(np.diff(curve.tokens) > 0):
                raise ProfileError(f"{where}: {name} needs increasing tokens with times of 0 to {MOST:g} ms")
            if not np.all(np.diff(curve.ms) >= 0):
                raise ProfileError(f"{where}: {name} needs times that do not fall as tokens grow")
        if profile.target.ms[0] <= 0:
            raise ProfileError(f"{where}: target needs times above 0 ms")
        for name in STEP_TIMES:
            if not _sensible((getattr(profile, name),)):
                raise ProfileError(f"{where}: {name} needs a time of 0 to {MOST:g} ms")
        if not isinstance(profile.machine, str) or not profile.machine.isprintable():
            raise ProfileError(f"{where}: machine needs a line of text")
        return profile

    @classmethod
    def load(cls, path: Path) -> "LatencyProfile":
        try:
            data = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise ProfileError(f"{path}: cannot be read ({error}); make one with `treegraft profile`") from error
        return cls.from_dict(data, str(path))

    @classmethod
    def what_if(cls, ratio: float) -> "LatencyProfile":
        """The what-if profile r: a target forward is 1 ms whatever its size, a call `ratio`, all else free."""
        return cls(Curve((1,), (1.0,)), Curve((1,), (ratio,)), machine=f"what-if r={ratio}")


def _sensible(values: tuple[Any, ...]) -> bool:
    return all(type(value) in (int, float) and 0 <= value <= MOST for value in values)


def fit_curve(tokens: np.ndarray, context: np.ndarray, ms: np.ndarray) -> Curve:
    """Fit a Curve, monotone in both arguments, to measured times (one entry a measurement)."""
    from scipy.optimize import nnls  # only where a profile is measured, not on the decoding path

    grid = np.unique(tokens)
    # Non-negative steps between grid points keep the curve monotone; relative errors weigh small calls like large ones.
    steps = (tokens[:, None] >= grid[None, :]).astype(np.float64)
    design = np.column_stack([steps, context, context * tokens])
    solution, _ = nnls(design / ms[:, None], np.ones_like(ms))
    base = np.cumsum(solution[: len(grid)])
    return Curve(
        tuple(int(t) for t in grid),
        tuple(round(float(b), 4) for b in base),
        float(f"{solution[-2]:.6g}"),
        float(f"{solution[-1]:.6g}"),
    )
