"""Is s right at every depth? Decodes prompts with each drafter alone, and compares s with what the target chose.

    python benchmarks/s_by_depth.py --limit 2 --medium-dtype bfloat16 PROMPTS.jsonl...

Every node of the reselected trees counts, verified or not: a node is right where its whole path is the target's text.
"""

from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from treegraft.data.prompts import Conversation, read_prompts
from treegraft.runtime.decode import Plan, decode
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.models import load_model
from treegraft.runtime.scheduler import Mask
from treegraft.runtime.size import Cut
from treegraft.runtime.tree import DraftTree

EDGES = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)  # of the ranges of s in a row


def main(
    prompts: list[Path],
    limit: Annotated[int, typer.Option(help="Prompts of each file.")] = 2,
    target: str = "default",
    medium: str = "default-medium",
    medium_dtype: str = "float32",
    max_new_tokens: int = 128,
) -> None:
    models = load_model(target, dtype="float32"), load_model(medium, dtype=medium_dtype)
    asked = [Conversation(prompt, models[0].tokenizer).ids(0) for prompt in read_prompts(prompts, limit)]
    drafting = Drafting()
    ranges = [f"s {low:g} .. {high:g}" for low, high in pairwise(EDGES)]
    print(f"| drafter | depth | nodes | all | {' | '.join(ranges)} |\n{'| --- ' * (4 + len(ranges))}|")
    for name, mask in (("small", 0), ("medium", (1 << drafting.depth) - 1)):
        plan = Plan(name, Mask(mask), drafting, Cut("score", log_s=-2.5))
        found = np.concatenate([nodes(*models, ids, plan, max_new_tokens) for ids in asked])
        for depth in range(1, drafting.depth + 1):
            _, s, right = found[found[:, 0] == depth].T
            cells = [f"{s.mean():.3f}/{right.mean():.3f}"]
            for low, high in pairwise(EDGES):
                here = (low < s) & (s <= high)
                cells.append(f"{s[here].mean():.3f}/{right[here].mean():.3f}" if here.sum() >= 50 else "")
            print(f"| {name} | {depth} | {len(s)} | {' | '.join(cells)} |", flush=True)


def nodes(target, medium, prompt: list[int], plan: Plan, max_new_tokens: int) -> np.ndarray:  # type: ignore[no-untyped-def]
    """Depth, s and whether it is right (0 or 1) of every drafted node whose depth the answer reaches, (n, 3)."""
    trees: list[DraftTree] = []
    decoded = decode(target, medium, prompt, plan, max_new_tokens, on_tree=lambda tree, *_: trees.append(tree.fork()))
    found = []
    for done, tree in zip(decoded.rounds, trees, strict=True):
        text = decoded.tokens[done.position + 1 :]
        right = [True]
        for node in range(1, len(tree)):
            depth = tree.depth[node]
            right.append(right[tree.parent[node]] and depth <= len(text) and tree.token[node] == text[depth - 1])
            if depth <= len(text):
                found.append((depth, np.exp(tree.log_s[node]), right[node]))
    return np.array(found, dtype=float).reshape(-1, 3)


if __name__ == "__main__":
    typer.run(main)
