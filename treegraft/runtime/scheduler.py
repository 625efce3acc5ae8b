"""Schedules: which steps of a round call the medium drafter, and the artifact that carries a learned one.

An artifact is one JSON file, nothing executable (spec section 7; docs/artifact.md). Everything wrong with it is found
at load; at run time a missing or non-finite signal means its fallback schedule, one warning and a count.
"""

import hashlib
import json
import math
import reprlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from treegraft.runtime.drafting import Drafting
from treegraft.runtime.fields import Field, FieldError, parse_json, read_text
from treegraft.runtime.signals import GIVEN, SIGNALS, UNCERTAINTY, Reading

FORMAT, VERSION = "treegraft-scheduler", 2
MOST_BYTES = 4_000_000
MOST = 1024  # rules, conditions, tree nodes or test vectors
OPERATORS = ("<=", ">")


class ScheduleError(ValueError):
    """A schedule or artifact that cannot be used; the message names it, the field at fault and what to do."""


@dataclass(frozen=True)
class Mask:
    """A fixed schedule: bit k - 1 of `bits` set means that step k calls the medium drafter."""

    bits: int
    reads: tuple[str, ...] = ()

    def asks(self, step: int) -> bool:
        return False

    def decide(self, step: int, mask: int, signals: Mapping[str, float]) -> bool:
        return bool(self.bits >> (step - 1) & 1)


@dataclass(frozen=True)
class Rule:
    """Call at `step` where every condition (signal, operator, threshold) holds."""

    step: int
    conditions: tuple[tuple[str, str, float], ...]

    def holds(self, signals: Mapping[str, float]) -> bool:
        for name, operator, threshold in self.conditions:
            if not (signals[name] <= threshold if operator == "<=" else signals[name] > threshold):
                return False
        return True


@dataclass(frozen=True)
class Rules:
    """Threshold rules: call where any rule of the step holds."""

    rules: tuple[Rule, ...]
    reads: tuple[str, ...]

    @cached_property
    def _of_step(self) -> dict[int, list[Rule]]:
        return {step: [rule for rule in self.rules if rule.step == step] for step in {r.step for r in self.rules}}

    def asks(self, step: int) -> bool:
        """Whether a decision at `step` may have to work out a signal."""
        return any(name not in GIVEN for rule in self._of_step.get(step, ()) for name, _, _ in rule.conditions)

    def decide(self, step: int, mask: int, signals: Mapping[str, float]) -> bool:
        for rule in self._of_step.get(step, ()):  # noqa: SIM110 (any() would double the time)
            if rule.holds(signals):
                return True
        return False


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

    @cached_property
    def _root(self) -> Any:
        """The tree as nested (signal, threshold, low, high), each leaf its value: twice as fast to walk."""
        made: list[Any] = list(self.value)
        for node in reversed(range(len(made))):  # children come after their parent
            if self.feature[node] >= 0:
                name = self.reads[self.feature[node]]
                made[node] = (name, self.threshold[node], made[self.left[node]], made[self.right[node]])
        return made[0]

    def asks(self, step: int) -> bool:
        """Whether a decision at `step` may have to work out a signal."""
        ways = [self._root]
        while ways:
            node = ways.pop()
            if type(node) is tuple:
                name, threshold, low, high = node
                if name not in GIVEN:
                    return True
                ways += [low, high] if name != "step" else [low] if step <= threshold else [high]
        return False

    def margin(self, signals: Mapping[str, float]) -> float:
        node = self._root
        while type(node) is tuple:
            name, threshold, low, high = node
            node = low if signals[name] <= threshold else high
        return node

    def decide(self, step: int, mask: int, signals: Mapping[str, float]) -> bool:
        return self.margin(signals) > 0


Schedule = Mask | Rules | TreeModel


@dataclass
class Artifact:
    """A learned schedule with the constants it was trained for; `fallbacks` counts surprises at run time.

    `models` are the fingerprints of target and medium drafter, `log` is the SHA-256 of the training log's manifest,
    `expected` the gain over other schedules and the share of rounds that call at each step, `vectors` are the test
    vectors (treegraft/distill/vectors.py). docs/artifact.schema.json describes every field of the file.
    """

    schedule: Schedule
    drafting: dict[str, Any]
    cut: dict[str, Any]
    fallback: int
    models: dict[str, str]
    expected: dict[str, Any] = field(default_factory=dict)
    vectors: list[dict[str, Any]] = field(default_factory=list)
    log: str = ""
    fallbacks: int = 0

    @property
    def reads(self) -> tuple[str, ...]:
        return self.schedule.reads

    @cached_property
    def _uncertainty(self) -> list[str]:
        return [name for name in self.schedule.reads if name in UNCERTAINTY]

    def asks(self, step: int) -> bool:
        return self.schedule.asks(step)

    def decide(self, step: int, mask: int, signals: Mapping[str, float]) -> bool:
        """Whether to call the medium drafter at `step`; never raises, whatever the signals hold.

        Of a `Reading` only the target's uncertainty and the signals on the way to the decision have to be finite.
        """
        reads = self.schedule.reads
        try:
            if isinstance(signals, Reading):
                for name in self._uncertainty:  # what the target says decides for a whole round
                    signals[name]
                return self.schedule.decide(step, mask, signals)
            # A finite sum has finite terms alone; finite terms may still add up to infinity.
            if math.isfinite(sum(map(signals.__getitem__, reads))) or all(
                math.isfinite(signals[name]) for name in reads
            ):
                return self.schedule.decide(step, mask, signals)
        except (KeyError, TypeError, ValueError, ArithmeticError):
            pass
        if not self.fallbacks:
            held = [name for name in reads if name in signals]  # first: a reading holds only what was asked for
            at_fault = next((name for name in (*held, *reads) if not _is_finite(signals.get(name))), reads[0])
            warnings.warn(
                f"signal {at_fault!r} is missing or not finite; using the fallback schedule", stacklevel=2
            )  # fmt: skip
        self.fallbacks += 1
        return Mask(self.fallback).decide(step, mask, signals)

    @property
    def sha256(self) -> str:
        """Of the artifact's canonical bytes with nothing between the quotes of `sha256`."""
        return hashlib.sha256(self._text().encode()).hexdigest()

    def to_json(self) -> str:
        """The canonical text: the same artifact gives the same bytes."""
        return self._text().replace('"sha256":""', f'"sha256":"{self.sha256}"')

    def _text(self) -> str:
        schedule = self.schedule
        body: dict[str, Any]
        if isinstance(schedule, Mask):
            body = {"kind": "mask", "mask": schedule.bits}
        elif isinstance(schedule, Rules):
            rules = [
                {
                    "step": rule.step,
                    "all": [[name, operator, float(limit)] for name, operator, limit in rule.conditions],
                }
                for rule in schedule.rules
            ]
            body = {"kind": "rules", "rules": rules}
        else:
            tree: dict[str, list] = {name: list(getattr(schedule, name)) for name in ("feature", "left", "right")}
            tree |= {name: [float(v) for v in getattr(schedule, name)] for name in ("threshold", "value")}
            body = {"kind": "tree", "tree": tree}
        data = {
            "format": FORMAT, "version": VERSION, "sha256": "", "log": self.log, "models": self.models,
            "signals": list(schedule.reads), **body, "drafting": self.drafting, "cut": self.cut,
            "fallback": self.fallback, "expected": self.expected, "vectors": self.vectors,
        }  # fmt: skip
        return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n"


def load_artifact(path: Path) -> Artifact:
    """Read an artifact; raises ScheduleError naming the file, the field at fault and what it should be.

    Time and memory are bounded whatever the file holds: at most MOST_BYTES are read.
    """
    try:
        text = read_text(path, MOST_BYTES)
    except FieldError as error:
        raise ScheduleError(f"{path}: {error}; `treegraft distill` makes an artifact") from error
    return parse_artifact(text, str(path))


def parse_artifact(text: str, name: str) -> Artifact:
    """An artifact from its text; raises ScheduleError naming `name`, the field at fault and what it should be."""
    try:
        data = parse_json(text)
        if data["format"].value != FORMAT:
            raise FieldError(f"it is not a {FORMAT} file")
        if data["version"].value != VERSION:
            raise FieldError(
                f"version {reprlib.repr(data['version'].value)} is not known to this treegraft, which reads version "
                f"{VERSION}: update one or the other"
            )
        artifact = _read_artifact(data)
        # Whatever was not read above, or not written by us, differs here.
        if artifact.to_json() != text:
            raise FieldError("it was edited: its content no longer gives its sha256 or its canonical bytes")
    except (FieldError, ValueError, RecursionError) as error:
        raise ScheduleError(f"{name}: {error}; `treegraft distill` makes an artifact") from error
    return artifact


def _read_artifact(data: Field) -> Artifact:
    drafting = _read_drafting(data["drafting"])
    schedule = _read_schedule(data, drafting.depth)
    data["cut"].only("kind", "rho", "profile", "log_s")
    _check_cut(data["cut"])
    _check_expected(data["expected"], drafting.depth)
    for name in data["models"].fields().values():
        name.text()
    for vector in data["vectors"].items(MOST):
        _check_vector(vector, schedule, drafting.depth)
    return Artifact(
        schedule, data["drafting"].value, data["cut"].value, data["fallback"].integer(0, (1 << drafting.depth) - 1),
        data["models"].value, data["expected"].value, data["vectors"].value, data["log"].text(),
    )  # fmt: skip


def _read_drafting(data: Field) -> Drafting:
    data.only(*(f.name for f in fields(Drafting)))
    for setting in fields(Drafting):
        value = data[setting.name]
        if value.value is not None or setting.default is not None:
            value.integer(0, 1 << 20)
    try:
        return Drafting(**data.value)
    except ValueError as error:
        raise FieldError(f"{data.where}: {error}") from error


def _read_schedule(data: Field, depth: int) -> Schedule:
    reads = tuple(name.one_of(*SIGNALS) for name in data["signals"].items(len(SIGNALS)))
    if len(set(reads)) < len(reads):
        raise FieldError("signals names one twice")
    kind = data["kind"].one_of("mask", "rules", "tree")
    if kind == "mask":
        return Mask(data["mask"].integer(0, (1 << depth) - 1))
    if kind == "rules":
        rules = []
        for rule in data["rules"].items(MOST):
            conditions = []
            for condition in rule["all"].items(len(SIGNALS) * len(OPERATORS)):
                name, operator, threshold = condition.exactly(3)
                conditions.append((name.one_of(*reads), operator.one_of(*OPERATORS), threshold.number()))
            rules.append(Rule(rule["step"].integer(1, depth), tuple(conditions)))
        return Rules(tuple(rules), reads)
    tree = data["tree"]
    feature = tree["feature"].items(MOST)
    columns = {name: tree[name].exactly(len(feature)) for name in ("threshold", "left", "right", "value")}
    if not feature:
        raise FieldError("tree.feature is empty; a tree has at least one leaf")
    last, children = len(feature) - 1, list[int]()
    for node, signal in enumerate(feature):
        if signal.integer(-1, len(reads) - 1) >= 0:
            # Children come after their parent, so that a walk always ends.
            children += [columns[side][node].integer(node + 1, last) for side in ("left", "right")]
    if sorted(children) != list(range(1, last + 1)):
        raise FieldError("tree: its nodes make no tree; each one but the first needs exactly one parent")
    return TreeModel(
        tuple(signal.value for signal in feature),
        tuple(threshold.number() for threshold in columns["threshold"]),
        tuple(child.integer(-1, last) for child in columns["left"]),
        tuple(child.integer(-1, last) for child in columns["right"]),
        tuple(value.number() for value in columns["value"]),
        reads,
    )


def _check_cut(cut: Field) -> None:
    kind = cut["kind"].one_of("worth", "score", "none")
    if kind == "score":
        cut["log_s"].number(high=0)
    if kind == "worth":
        cut["rho"].number(low=1e-12, high=1e12)
        profile, extras = cut["profile"], ("small_step_ms", "medium_step_ms", "round_ms")
        # Absent from artifacts made before profiles had them.
        later = ("medium_first_ms", "decision_ms", "uncertainty_ms")
        profile.only("target", "medium", "machine", *extras, *later)
        profile["machine"].text()
        for name in (*extras, *(name for name in later if name in profile.fields())):
            profile[name].number(low=0)
        for role in ("target", "medium"):
            curve, slopes = profile[role], ("context_ms", "context_token_ms")
            curve.only("tokens", "ms", *slopes)
            for name in slopes:
                curve[name].number(low=0)
            tokens = [count.number(low=0) for count in curve["tokens"].items(MOST)]
            times = [time.number(low=0) for time in curve["ms"].exactly(len(tokens))]
            if not times or any(low >= high for low, high in pairwise(tokens)):
                raise curve["tokens"].wrong("a list of increasing numbers of tokens")


def _check_expected(expected: Field, depth: int) -> None:
    groups = expected.fields()
    gains = [*groups["by_file"].fields().values()] if "by_file" in groups else []
    for by_schedule in [*gains, *([groups["overall"]] if "overall" in groups else [])]:
        for found in by_schedule.fields().values():
            found["gain"].number(low=0)
            for end in found["interval"].exactly(2):
                end.number(low=0)
    for shares in groups["calls"].fields().values() if "calls" in groups else ():
        for share in shares.exactly(depth):
            share.number(low=0, high=1)


def _check_vector(vector: Field, schedule: Schedule, depth: int) -> None:
    """Raise FieldError where the schedule decides otherwise than a test vector says."""
    step = vector["state"]["step"].integer(1, depth)
    mask = vector["state"]["mask"].integer(0, (1 << depth) - 1)
    signals = {name: vector["signals"][name].number() for name in schedule.reads}
    if schedule.decide(step, mask, signals) != vector["invoke"].truth():
        raise FieldError(f"{vector.where} gives another decision; the file was altered")
    if isinstance(schedule, TreeModel) and schedule.margin(signals) != vector["margin"].number():
        raise FieldError(f"{vector.where} gives another margin; the file was altered")


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, ArithmeticError):
        return False


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
