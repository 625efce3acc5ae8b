"""A decoder that is not ours: signals from plain columns, and the worked example."""

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from artifacts import DRAFTING
from tiny import greedy, prompts, same_text

from treegraft.distill.vectors import grow
from treegraft.runtime.models import Model
from treegraft.runtime.scheduler import Artifact, TreeModel
from treegraft.runtime.signals import SIGNALS, PlainTree, State, compute

EXAMPLE = Path(__file__).parent.parent / "examples" / "foreign_decoder.py"


def test_plain_columns_in_lists_or_arrays_give_the_signals_of_our_own_tree() -> None:
    dice = random.Random(0)
    for _ in range(200):
        tree = grow(3, dice.randrange(4), DRAFTING, dice)
        columns = tree.parent, tree.log_p, tree.visited, tree.new
        ours, lists, arrays = (
            compute(list(SIGNALS), State(each, 3, 3, 1, 9, 4, 1.5, 0.5, match=lambda n: (n % 3, n), planned=lambda: 2))
            for each in (tree, PlainTree(*columns), PlainTree(*map(np.array, columns)))
        )
        assert ours == lists == arrays and all(type(value) in (int, float) for value in arrays.values())


@pytest.mark.parametrize(
    "columns, complaint",
    [
        (([-1, 1], [0.0, -1.0], [0, 0], [1]), r"parent\[1\] is 1"), (([-1, 0], [0.0, 0.5], [0, 0], [1]), r"log_p\[1\]"),
        (([-1, 0], [0.0, float("nan")], [0, 0], [1]), r"log_p\[1\]"), (([-1], [0.0], [0, 0], [0]), "1, 1 and 2 nodes"),
        (([], [], [], []), "0, 0 and 0 nodes"), (([-1], [0.0], [0], [4]), "new holds node 4"),
    ],
)  # fmt: skip
def test_columns_that_are_no_tree_are_refused_by_node(columns: tuple, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        PlainTree(*columns)


@torch.no_grad()
def test_the_example_decodes_the_targets_text_and_calls_where_the_artifact_says(
    pair: Callable[[str], tuple[Model, Model]],
) -> None:
    spec = importlib.util.spec_from_file_location("foreign_decoder", EXAMPLE)
    assert spec and spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    target, medium = pair("llama")
    # Call at step 2, and at step 1 where the root matches nothing earlier.
    schedule = TreeModel(
        (0, 1, -1, -1, 0, -1, -1), (1.5, 0.5, 0.0, 0.0, 2.5, 0.0, 0.0), (1, 2, -1, -1, 5, -1, -1),
        (4, 3, -1, -1, 6, -1, -1), (0.0, 0.0, 1.0, -1.0, 0.0, 1.0, -1.0), ("step", "root_match"),
    )  # fmt: skip
    artifact = Artifact(schedule, DRAFTING.as_dict(), {"kind": "none"}, 0, {})
    rounds = 0
    for prompt in prompts(4, seed=3):
        tokens, masks = example.generate(target, medium, prompt, artifact, 24)
        assert same_text(target, prompt, tokens, greedy(target, prompt, 24))
        assert set(masks) <= {0b11, 0b10}
        rounds += len(masks)
    assert rounds < 4 * 23 and artifact.fallbacks == 0


def test_the_example_stays_under_eighty_lines_and_off_our_tree_code() -> None:
    lines = EXAMPLE.read_text().splitlines()
    ours = [line.split()[1] for line in lines if line.startswith("from treegraft")]
    assert len(lines) < 80
    assert ours == ["treegraft.runtime.models", "treegraft.runtime.scheduler", "treegraft.runtime.signals"]
