"""A decoder of its own, with draft trees in plain lists, that lets a treegraft artifact schedule its medium drafter.

Run `python examples/foreign_decoder.py scheduler.json "Why is the sky blue?"`; it keeps no cache, so it is no race."""

import math
import sys
from collections import Counter
from pathlib import Path

import torch

from treegraft.runtime.models import load_model  # any pair of transformers models will do
from treegraft.runtime.scheduler import load_artifact
from treegraft.runtime.signals import PlainTree, State, compute


def small(text, longest=6):
    """The longest earlier match of the text's end: its length, the tokens since, and proposals (token, log p)."""
    for length in range(min(longest, len(text) - 1), 0, -1):
        if ends := [i for i in range(length, len(text)) if text[i - length : i] == text[-length:]]:
            counts = Counter(text[i] for i in ends)
            return length, len(text) - ends[-1], [(t, math.log(n / (1 + len(ends)))) for t, n in counts.most_common()]
    return 0, 0, []


def medium(drafter, text, most):
    """The medium drafter's likeliest next tokens, (token, log p)."""
    log_p, ids = drafter.lm(torch.tensor([text])).logits[0, -1].log_softmax(-1).topk(most)
    ids = ids if drafter.draft_vocabulary is None else drafter.draft_vocabulary[ids]
    return list(zip(ids.tolist(), log_p.tolist()))


def generate(target, drafter, prompt, artifact, count):
    """`count` greedy tokens of the target, and each round's mask of medium steps."""
    shape, most, accepted, masks, known = artifact.drafting, artifact.drafting["children"], [], [], 0
    chose = target.lm(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    text = [*prompt, int(chose.argmax())]
    while len(text) < len(prompt) + count:
        parent, paths, log_p, entered, new, mask = [-1], [text], [0.0], 0, [0], 0
        tree = PlainTree(parent, log_p, [False], new)
        for step in range(1, shape["depth"] + 1):
            state = State(
                tree, shape["width"], step, mask, len(prompt), answer_position=len(text) - len(prompt) - 1,
                target_entropy=float(-(chose.exp() * chose).nansum()), accepted=accepted,
                target_margin=float(-chose.topk(2).values.diff()), lag=0 if mask else len(text) - 1 - known,
                match=lambda node, paths=paths: small(paths[node])[:2],
                planned=lambda tree=tree: min(tree.visited.count(False), shape["width"]),
            )  # fmt: skip
            left = mask.bit_count() != shape["medium_calls"]
            call = left and artifact.decide(step, mask, compute(artifact.reads, state))
            frontier, new = sorted(range(entered, len(parent)) if call else new, key=tree.rank)[: shape["width"]], []
            if call:
                entered, mask, known = len(parent), mask | 1 << (step - 1), len(text)
            for node in frontier:
                for token, log in medium(drafter, paths[node], most) if call else small(paths[node])[2][:most]:
                    if (path := [*paths[node], token]) not in paths:
                        new.append(len(paths))
                        parent, paths, log_p = [*parent, node], [*paths, path], [*log_p, log]
            tree = PlainTree(parent, log_p, [node < entered for node in range(len(parent))], new)
        # One target forward for the whole tree: a node sees the text, its ancestors and itself.
        shown = [text[: i + 1] for i in range(len(text))]
        shown += [paths[node] for node in sorted(range(1, len(paths)), key=tree.rank)[: shape["budget"]]]
        sees = torch.tensor([[one[: len(other)] == other for other in shown] for one in shown])
        blind = torch.zeros(1, 1, *sees.shape, dtype=target.lm.dtype).masked_fill(~sees, -1e9)
        ids, places = torch.tensor([[[path[-1], len(path) - 1] for path in shown]]).unbind(-1)
        logits = target.lm(ids, attention_mask=blind, position_ids=places).logits[0]
        while text in shown:
            chose = logits[shown.index(text)].log_softmax(-1)
            text = [*text, int(chose.argmax())]
        accepted, masks = [*accepted, len(text) - len(paths[0]) - 1], [*masks, mask]
    return text[len(prompt) :][:count], masks


if __name__ == "__main__":
    models = load_model("default"), load_model("default-medium")
    prompt = models[0].tokenizer(sys.argv[2])["input_ids"]
    with torch.no_grad():
        tokens, masks = generate(*models, prompt, load_artifact(Path(sys.argv[1])), 64)
    print(models[0].tokenizer.decode(tokens), masks)
