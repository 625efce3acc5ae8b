"""Calibrate the n-gram drafter: how often does the target continue with a proposal, given how it was found?

Decodes the package's own training prompts with the default target, looks up the n-gram proposals at every answer
position, and fits a logistic regression of "the target's next token is this proposal" on match length, rank, share,
count and recency. Writes treegraft/data/ngram-calibration.json. About ten minutes on two cores:

    python tools/calibrate_ngram.py --limit 8
"""

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from sklearn.linear_model import LogisticRegression

from treegraft.data.prompts import Conversation, read_prompts, shipped
from treegraft.runtime.decode import Plan, decode
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.models import load_model
from treegraft.runtime.ngram import CALIBRATION_FILE, NGramDrafter
from treegraft.runtime.scheduler import Mask
from treegraft.runtime.size import Cut
from treegraft.runtime.tree import Paths

RANKS = 4
START = {
    "length": [0.0] * NGramDrafter.longest,
    "rank": [0.0] * RANKS,
    "share": [0.0],
    "count": [0.0],
    "recency": [0.0],
}


def main(
    limit: Annotated[int, typer.Option(help="Prompts of each shipped training file.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Answer tokens.")] = 128,
    out: Annotated[Path, typer.Option(help="Calibration file.")] = CALIBRATION_FILE,
) -> None:
    target = load_model("default", dtype="float32")
    plan = Plan("small", Mask(0), Drafting(depth=4), Cut("score", log_s=-2.5))
    rows, hits = [], []
    for prompt in read_prompts(shipped("train"), limit):
        ids = Conversation(prompt, target.tokenizer).ids(0)
        answer = decode(target, None, ids, plan, max_new_tokens).tokens
        small = NGramDrafter(START)
        small.extend(ids)
        for position, root in enumerate(answer[:-1]):
            small.extend([root])
            paths = Paths(root, ids + answer[:position], small.longest)
            for token, found in small.candidates(paths, 0, RANKS):
                rows.append(features(found))
                hits.append(token == answer[position + 1])
    design, hit = np.array(rows), np.array(hits)
    model = LogisticRegression(fit_intercept=False, C=1.0, max_iter=1000).fit(design, hit)
    weights, start = model.coef_[0], 0
    calibration = {}
    for name, values in START.items():
        calibration[name] = [round(float(w), 4) for w in weights[start : start + len(values)]]
        start += len(values)
    out.write_text(json.dumps(calibration, indent=1) + "\n")
    print(f"{len(hit)} proposals, {hit.mean():.3f} right; predicted against observed by decile:")
    predicted = model.predict_proba(design)[:, 1]
    for part in np.array_split(np.argsort(predicted), 10):
        print(f"  {predicted[part].mean():.3f}  {hit[part].mean():.3f}")


def features(found: tuple[int, int, int, int, int]) -> list[float]:
    """The row of the design matrix that `NGramDrafter.log_p` multiplies with its calibration."""
    length, rank, times, total, since = found
    by_length = [float(length == i + 1) for i in range(NGramDrafter.longest)]
    by_rank = [float(min(rank, RANKS - 1) == i) for i in range(RANKS)]
    return [*by_length, *by_rank, times / total, float(np.log(times)), float(np.log(since))]


if __name__ == "__main__":
    typer.run(main)
