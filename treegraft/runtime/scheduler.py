"""Schedules: which steps of a round call the medium drafter, and the artifact that carries a learned one.

An artifact is one JSON file, nothing executable (spec section 7). Everything wrong with it is found at load; at run
time a missing or non-finite signal means its fallback schedule, one warning and a count.
"""

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treegraft.runtime.signals import SIGNALS

FORMAT, VERSION = "treegraft-scheduler", 1
MOST_BYTES = 4_000_000
OPERATORS = ("<=", ">")


class ScheduleError(ValueError):
    """A schedule or artifact that cannot be used; the message names it, the field at fault and what to do."""


@dataclass(frozen=True)
class Mask:
    """A fixed schedule: bit k - 1 of `bits` set means that step k calls the medium drafter."""

    bits: int
    reads: tuple[str, ...] = ()

    def decide(self, step: int, mask: int, signals: Mapping[str, float]) -> bool:
        return bool(self.bits >> (step - 1) & 1)


@dataclass(frozen=True)
class Rule:
    """Call at `step` where every condition (signal, operator, threshold) holds."""

    step: int
    conditions: tuple[tuple[str, str, float], ...]

    def holds(self, signals: Mapping[str, float]) -> bool:
        return all(
            signals[name] <= threshold if operator == "<=" else signals[name] > threshold
            for name, operator, threshold in self.conditions
        )


@dataclass(frozen=True)
class Rules:
    """Threshold rules: call where any rule of the step holds."""

    rules: tuple[Rule, ...]
    reads: tuple[str, ...]

    def decide(self, step: int, mask: int, signals: Mapping[str, float]) -> bool:
        return any(rule.step == step and rule.holds(signals) for rule in self.rules)


@dataclass(frozen=True)
class TreeModel:
    """A decision tree in arrays; node i goes left where its signal <= threshold[i]; a leaf has feature -1.

    The leaf's value is its margin, the gain in expected worth (tokens) of calling over skipping; > 0 calls.
    """

    feature: tuple[int, ...]
    threshold: tuple[float, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    value: tuple[float, ...]
    reads: tuple[str, ...]

    def margin(self, signals: Mapping[str, float]) -> float:
        node = 0
        while self.feature[node] >= 0:
            low = signals[self.reads[self.feature[node]]] <= self.threshold[node]
            node = self.left[node] if low else self.right[node]
        return self.value[node]

    def decide(self, step: int, mask: int, signals: Mapping[str, float]) -> bool:
        return self.margin(signals) > 0


Schedule = Mask | Rules | TreeModel


@dataclass
class Artifact:
    """A learned schedule with the constants it was trained for; `fallbacks` counts surprises at run time."""

    schedule: Schedule
    drafting: dict[str, Any]
    cut: dict[str, Any]
    fallback: int
    models: dict[str, str]
    expected: dict[str, Any] = field(default_factory=dict)
    vectors: list[dict[str, Any]] = field(default_factory=list)
    fallbacks: int = 0

    @property
    def reads(self) -> tuple[str, ...]:
        return self.schedule.reads

    def decide(self, step: int, mask: int, signals: Mapping[str, float]) -> bool:
        for name in self.schedule.reads:
            if not math.isfinite(signals.get(name, math.nan)):
                if not self.fallbacks:
                    warnings.warn(
                        f"signal {name!r} is missing or not finite; using the fallback schedule", stacklevel=2
                    )
                self.fallbacks += 1
                return Mask(self.fallback).decide(step, mask, signals)
        return self.schedule.decide(step, mask, signals)

    def to_json(self) -> str:
        schedule = self.schedule
        body: dict[str, Any]
        if isinstance(schedule, Mask):
            body = {"kind": "mask", "mask": schedule.bits}
        elif isinstance(schedule, Rules):
            rules = [{"step": rule.step, "all": [list(c) for c in rule.conditions]} for rule in schedule.rules]
            body = {"kind": "rules", "rules": rules}
        else:
            columns = ("feature", "threshold", "left", "right", "value")
            body = {"kind": "tree", "tree": {name: list(getattr(schedule, name)) for name in columns}}
        data = {
            "format": FORMAT, "version": VERSION, "signals": list(schedule.reads), **body,
            "drafting": self.drafting, "cut": self.cut, "fallback": self.fallback, "models": self.models,
            "expected": self.expected, "vectors": self.vectors,
        }  # fmt: skip
        return json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n"


def load_artifact(path: Path) -> Artifact:
    """Read an artifact; raises ScheduleError naming the file and the field at fault."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ScheduleError(f"{path}: {path.stat().st_size} bytes; an artifact has at most {MOST_BYTES}")
        data = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ScheduleError):
            raise
        raise ScheduleError(
            f"{path}: cannot be read as an artifact ({error}); `treegraft distill` makes one"
        ) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ScheduleError(f"{path}: not a {FORMAT} file; `treegraft distill` makes one")
    if data.get("version") != VERSION:
        raise ScheduleError(
            f"{path}: version {data.get('version')!r} is not known to this treegraft (it reads version {VERSION}); "
            "update treegraft, or distill again"
        )
    try:
        schedule = _parse_schedule(data)
        fallback = int(data["fallback"])
        artifact = Artifact(
            schedule, dict(data["drafting"]), dict(data["cut"]), fallback, dict(data["models"]),
            dict(data["expected"]), list(data["vectors"]),
        )  # fmt: skip
        wrong = [
            index
            for index, vector in enumerate(artifact.vectors)
            if schedule.decide(vector["step"], vector["mask"], vector["signals"]) != vector["invoke"]
        ]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ScheduleError(f"{path}: damaged ({type(error).__name__}: {error}); distill again") from error
    if wrong:
        raise ScheduleError(f"{path}: test vector {wrong[0]} gives another decision; the file was altered")
    return artifact


def _parse_schedule(data: dict[str, Any]) -> Schedule:
    reads = tuple(data["signals"])
    for name in reads:
        if name not in SIGNALS:
            raise ValueError(f"unknown signal {name!r}")
    if data["kind"] == "mask":
        return Mask(int(data["mask"]))
    if data["kind"] == "rules":
        rules = []
        for rule in data["rules"]:
            conditions = tuple((str(name), str(op), _finite(value)) for name, op, value in rule["all"])
            for name, op, _ in conditions:
                if name not in reads or op not in OPERATORS:
                    raise ValueError(f"condition {name!r} {op!r}")
            rules.append(Rule(int(rule["step"]), conditions))
        return Rules(tuple(rules), reads)
    if data["kind"] == "tree":
        tree = data["tree"]
        columns = [tuple(tree[name]) for name in ("feature", "left", "right")]
        numbers = [tuple(_finite(v) for v in tree[name]) for name in ("threshold", "value")]
        if len({len(column) for column in (*columns, *numbers)}) != 1 or not columns[0]:
            raise ValueError("tree columns differ in length")
        for node, (feature, left, right) in enumerate(zip(*columns)):
            # Children come after their parent, so that a walk always ends.
            inner = node < left < len(columns[0]) and node < right < len(columns[0]) and 0 <= feature < len(reads)
            if feature != -1 and not inner:
                raise ValueError(f"tree node {node}")
        return TreeModel(columns[0], numbers[0], columns[1], columns[2], numbers[1], reads)
    raise ValueError(f"kind {data['kind']!r}")


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)


def parse_mask(text: str, depth: int) -> Mask | None:
    """`small`, `medium`, `0b00101` or an integer as a Mask for K = `depth`; None if it is none of these."""
    if text == "small":
        return Mask(0)
    if text == "medium":
        return Mask((1 << depth) - 1)
    try:
        bits = int(text, 0)
    except ValueError:
        return None
    if not 0 <= bits < 1 << depth:
        raise ScheduleError(f"schedule {text!r} does not fit K = {depth} steps; it must be below {bin(1 << depth)}")
    return Mask(bits)
