"""Tell a float tie from a wrong text: trees of different shapes round differently, by about 1e-5 in a logit."""

import copy
import warnings
from typing import Any

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel

from treegraft.runtime.models import Model
from treegraft.runtime.sampling import Chooser

TIE = 1e-4


def compare_texts(
    target: Model, prompt: list[int], ours: list[int], reference: list[int], chooser: Chooser | None = None
) -> str:
    """ "equal", "tie", "different" or "unconfirmed" for two answers (token ids) to one prompt.

    A tie is a first difference whose two tokens are the target's two best there, with scores (after processors and
    noise) closer than 1e-4 in the model's own precision and in float64. What follows a tie is not compared. A
    difference is unconfirmed where that check fails, for want of memory say; a warning tells why.
    """
    if ours == reference:
        return "equal"
    at = next((i for i, (a, b) in enumerate(zip(ours, reference)) if a != b), None)
    if at is None:  # one is the other's beginning
        return "different"
    text, chooser = prompt + reference[:at], chooser or Chooser()
    try:
        for exact in (False, True):
            lm, device = (in_float64(target.lm), "cpu") if exact else (target.lm, target.device)
            with torch.inference_mode():
                logits = lm(torch.tensor([text], device=device), use_cache=False, logits_to_keep=1).logits[0, -1]
            best = chooser.scores(text, logits).topk(2)
            close = float(best.values[0] - best.values[1]) < TIE  # no score that is NaN is
            if not close or {ours[at], reference[at]} != set(best.indices.tolist()):
                return "different"
    except Exception as error:  # whatever it is, it must not cost the caller what was measured so far
        warnings.warn(
            f"whether two texts of {target.name} that part after {at} tokens tie there could not be checked "
            f"({type(error).__name__}: {error})",
            stacklevel=2,
        )
        return "unconfirmed"
    return "tie"


def in_float64(lm: PreTrainedModel) -> Any:
    """A copy of `lm` that runs in float64 on the CPU and shares its weights: each module's are cast while it runs.

    So no second model is held. Its forward raises MemoryError where a module's weights are too many for this machine.
    """
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*lm.parameters(), *lm.buffers())}
    twin: Any = copy.deepcopy(lm, shared)
    twin.config._experts_implementation = "eager"  # the products of all experts at once know no float64
    for module in twin.modules():
        _cast_while_it_runs(module)
    return twin


def _cast_while_it_runs(module: nn.Module) -> None:
    """Put the module's own parameters and buffers on the CPU, in float64, before its forward, and let go of them after.

    Weights that a forward takes from a module it does not call stay as they are, and torch refuses to mix them.
    """
    tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    own = [{name: tensor for name, tensor in table.items() if tensor is not None} for table in tables]
    if not any(own):
        return

    def cast(*_: Any) -> None:
        size = sum(8 * tensor.numel() for table in own for tensor in table.values())
        if 2 * size > psutil.virtual_memory().available:  # as much again for what they are multiplied with
            raise MemoryError(f"{type(module).__name__} takes {size / 2**30:.1f} GiB in float64")
        for table, originals in zip(tables, own):
            for name, tensor in originals.items():
                table[name] = tensor.to("cpu", torch.float64 if tensor.is_floating_point() else tensor.dtype)

    def let_go(*_: Any) -> None:
        for table, originals in zip(tables, own):
            table.update(originals)

    module.register_forward_pre_hook(cast)
    module.register_forward_hook(let_go)
