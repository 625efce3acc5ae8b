"""Tell a float tie from a wrong text: trees of different shapes round differently, by about 1e-5 in a logit."""

import copy

import torch

from treegraft.runtime.models import Model
from treegraft.runtime.sampling import Chooser

TIE = 1e-4


def compare_texts(
    target: Model, prompt: list[int], ours: list[int], reference: list[int], chooser: Chooser | None = None
) -> str:
    """ "equal", "tie" or "different" for two answers (token ids) to one prompt.

    A tie is a first difference whose two tokens are the target's two best there, with scores (after processors and
    noise) closer than 1e-4 in the model's own precision and in float64. What follows a tie is not compared.
    """
    if ours == reference:
        return "equal"
    at = next((i for i, (a, b) in enumerate(zip(ours, reference)) if a != b), None)
    if at is None:  # one is the other's beginning
        return "different"
    text, chooser = prompt + reference[:at], chooser or Chooser()
    for lm in (target.lm, copy.deepcopy(target.lm).double()):
        with torch.inference_mode():
            logits = lm(torch.tensor([text], device=target.device), use_cache=False, logits_to_keep=1).logits[0, -1]
        best = chooser.scores(text, logits).topk(2)
        if {ours[at], reference[at]} != set(best.indices.tolist()) or float(best.values[0] - best.values[1]) >= TIE:
            return "different"
    return "tie"
