"""Hand-made artifacts with real test vectors, and files that are sealed as treegraft seals them."""

import hashlib
import json
from pathlib import Path
from typing import Any

from log_fixture import PLANTED_PROFILE, random_log

from treegraft.distill.vectors import vectors
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.scheduler import Artifact, Mask, Rule, Rules, Schedule, TreeModel
from treegraft.value_system.replay import fixed_point, flatten
from treegraft.value_system.value import states_of

DRAFTING = Drafting(depth=3, width=3, children=3, budget=6)
RULES = Rules(
    (
        Rule(1, (("root_match", ">", 1.5),)),
        Rule(2, (("frontier_score_mean", "<=", -0.25), ("lag", ">", 2.5))),
        Rule(3, (("target_entropy", "<=", 0.5), ("pool_size", ">", 2.5))),
        Rule(3, (("pool_size", "<=", 1.5),)),
    ),
    ("root_match", "frontier_score_mean", "lag", "target_entropy", "pool_size"),
)
TREE = TreeModel(
    (0, 1, -1, -1, 2, -1, 3, -1, -1),
    (1.5, 0.25, 0.0, 0.0, -0.75, 0.0, 1.5, 0.0, 0.0),
    (1, 2, -1, -1, 5, -1, 7, -1, -1),
    (4, 3, -1, -1, 6, -1, 8, -1, -1),
    (0.0, 0.0, 0.25, -0.5, 0.0, 0.125, 0.0, -0.75, 1.5),
    ("step", "target_margin", "reselect_score_change", "pool_size"),
)
SCHEDULES: list[Schedule] = [Mask(0b101), RULES, TREE]


def make(schedule: Schedule) -> Artifact:
    """An artifact that passes `treegraft verify`."""
    log = flatten(random_log(0, (30, 30)))
    _, run = fixed_point(log, schedule, PLANTED_PROFILE, DRAFTING)
    gains = {"small": {"gain": 1.25, "interval": [1.125, 1.5]}, "medium": {"gain": 0.875, "interval": [0.75, 0.9375]}}
    return Artifact(
        schedule, DRAFTING.as_dict(), {"kind": "score", "log_s": -2.0}, 0b010, {"target": "a", "medium": "b"},
        {"overall": gains, "by_file": {"f0": gains}, "calls": {"overall": [0.5, 0.0, 0.25], "f0": [0.5, 0.0, 0.25]}},
        vectors(schedule, log, states_of(log, run), DRAFTING), "0" * 64,
    )  # fmt: skip


def seal(data: dict[str, Any]) -> str:
    """The canonical text of an artifact's data with its right hash, whatever the data are."""
    data = {**data, "sha256": ""}
    text = json.dumps(data, sort_keys=True, separators=(",", ":")) + "\n"
    return text.replace('"sha256":""', f'"sha256":"{hashlib.sha256(text.encode()).hexdigest()}"')


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
