"""Checks an artifact as its user would: schema, hash, and every test vector from the plain tree state on."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treegraft.runtime.drafting import Drafting, plan_medium
from treegraft.runtime.scheduler import Artifact, ScheduleError, load_artifact
from treegraft.runtime.signals import PlainTree, State, compute
from treegraft.runtime.tree import DraftTree

SCHEMA = Path(__file__).parent.parent / "data" / "artifact.schema.json"


def verify(path: Path) -> Artifact:
    """Load an artifact, hold it against the JSON Schema, and recompute its test vectors.

    Raises ScheduleError naming the file and the field or vector at fault.
    """
    import jsonschema

    artifact = load_artifact(path)
    try:
        jsonschema.validate(json.loads(path.read_text()), json.loads(SCHEMA.read_text()))
    except jsonschema.ValidationError as error:
        raise ScheduleError(f"{path}: {error.json_path} does not keep to the schema: {error.message[:200]}") from error
    drafting = Drafting(**artifact.drafting)
    for index, vector in enumerate(artifact.vectors):
        where, numbers = f"{path}: vectors[{index}]", vector["state"]
        try:
            planned = len(plan_medium(tree_of(numbers), drafting))
            signals = compute(artifact.reads, state_of(numbers, drafting.width))
        except (ValueError, IndexError) as error:
            raise ScheduleError(f"{where}.state is not a draft tree ({error})") from error
        if planned != numbers["planned"]:
            raise ScheduleError(f"{where}.state.planned is {numbers['planned']}; a medium step would process {planned}")
        for name, value in signals.items():
            if not math.isclose(value, vector["signals"][name], rel_tol=1e-9, abs_tol=1e-12):
                raise ScheduleError(f"{where}.signals.{name} is {vector['signals'][name]}; its state gives {value}")
    return artifact


def state_of(numbers: Mapping[str, Any], width: int) -> State:
    """The state that a test vector's plain numbers describe, as any decoder would pass its own."""
    tree = PlainTree(numbers["parent"], numbers["log_p"], numbers["visited"], numbers["new"])
    return State(
        tree, width, numbers["step"], numbers["mask"], numbers["prompt_length"], numbers["answer_position"],
        numbers["target_entropy"], numbers["target_margin"], match=lambda node: tuple(numbers["match"][node]),
        planned=lambda: numbers["planned"], lag=numbers["lag"], accepted=numbers["accepted"],
    )  # fmt: skip


def tree_of(numbers: Mapping[str, Any]) -> DraftTree:
    """The same tree as our decoder's own, its tokens and paths unknown."""
    plain = PlainTree(numbers["parent"], numbers["log_p"], numbers["visited"], numbers["new"])
    unknown = [-1] * len(plain.depth)
    return DraftTree(
        unknown, list(numbers["parent"]), unknown, plain.depth, list(numbers["log_p"]), plain.log_s, plain.visited,
        [bool(held) for held in numbers["processed"]], [tuple(children) for children in plain.children], plain.new,
        [""] * len(unknown),
    )  # fmt: skip
