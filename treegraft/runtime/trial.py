"""Whether the tree decoder can serve a model, found by trying: names and lists of architectures would be guesses."""

import copy
import weakref
from contextlib import suppress
from typing import Any, cast

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel

from treegraft.runtime.attention import COARSE
from treegraft.runtime.forward import TreeForward, alone
from treegraft.runtime.model import Model, ModelError, text_config
from treegraft.runtime.tree import Paths

# What a configuration has where its model keeps a state that no two branches can share; to say so, not to decide.
RECURRENT = ("ssm_cfg", "state_size", "mamba_d_state", "mamba_d_conv", "conv_L_cache", "attention_hidden_size",
             "linear_conv_kernel_dim", "lru_width", "mlstm_round_up_to_multiple_of")  # fmt: skip

_tried: weakref.WeakKeyDictionary[PreTrainedModel, Any] = weakref.WeakKeyDictionary()


def check_branching(name: str, lm: PreTrainedModel) -> bool:
    """Raise ModelError unless `lm` gives a token the same scores in a draft tree as alone; tried once a setting.

    A small tree with two branches is processed, the second branch kept, and one token processed after it; the scores
    along the way have to be those of the model's own forward over the same text, rounding aside. A few layers of every
    kind are tried; all of them where those fail. Where rounding is coarse they are tried in float32 too, if there is
    memory for it. Returns whether it was tried now.
    """
    if (settings := _settings(lm)) == _tried.get(lm):
        return False
    if lm.device.type == "meta":
        raise ModelError(f"model {name!r}: its weights are not in memory (they were offloaded, or never loaded)")
    with torch.autocast(lm.device.type, enabled=False):  # it would round more coarsely than allowed for here
        _try(name, lm)
    _tried[lm] = settings
    return True


def _try(name: str, lm: PreTrainedModel) -> None:
    short = shortened(lm)
    told = "" if short is not None and not _fault(short) else _fault(lm)
    if not told and lm.dtype in COARSE:
        told = _fault_in_float32(short or lm)
    if told:
        raise ModelError(f"model {name!r} ({type(lm).__name__}) cannot branch over a draft tree: {told}. {_advice(lm)}")


def _settings(lm: PreTrainedModel) -> Any:
    """What a trial depends on: configuration, precision, and each module's kind, mode, hooks and own forward."""
    modules = [
        (type(part), part.training, *part._forward_hooks, *part._forward_pre_hooks, vars(part).get("forward"))
        for part in lm.modules()
    ]
    return lm.config.to_json_string(use_diff=False), lm.dtype, modules


def _fault(lm: PreTrainedModel) -> str:
    """What is wrong with trees on `lm`; "" where nothing is."""
    try:
        with alone, torch.inference_mode():
            return _difference(lm)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model's code may raise anything
        return f"its forward ends in {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _fault_in_float32(lm: PreTrainedModel) -> str:
    """How a copy in float32 on the CPU differs in trees; "" too where no such copy can be made, or run."""
    size = sum(weight.numel() for weight in lm.parameters())
    told = ""
    if 8 * size < psutil.virtual_memory().available / 2:
        with suppress(Exception), alone, torch.inference_mode():
            twin: Any = copy.deepcopy(lm)
            told = _difference(twin.to("cpu", torch.float32))
    return told


def shortened(lm: PreTrainedModel) -> PreTrainedModel | None:
    """The same model with a few of its layers, the modules themselves; None where it has no list of layers."""
    count = getattr(text_config(lm), "num_hidden_layers", None)
    lists = {name: part for name, part in lm.named_modules() if isinstance(part, nn.ModuleList) and len(part) == count}
    name, layers = next(iter(lists.items()), ("", nn.ModuleList()))
    kinds = [_kind(layer) for layer in layers]
    few = [i for i, kind in enumerate(kinds) if kinds[:i].count(kind) < 2 or kind not in kinds[i + 1 :]]
    if not name or len(few) == count:
        return None
    short = part = copy.copy(lm)
    *above, last = name.split(".")
    for step in above:
        part._modules = {**part._modules, step: copy.copy(part._modules[step])}
        part = part._modules[step]  # type: ignore[assignment]
    part._modules = {**part._modules, last: nn.ModuleList(layers[i] for i in few)}
    return short


def _kind(layer: nn.Module) -> Any:
    """What tells kinds of layers apart: their modules, and the settings and changes of each."""
    kind = []
    for name, module in layer.named_modules():
        settings = {key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str)}
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        kind.append((name, type(module), sorted(vars(module)), hooks, {**settings, "layer_idx": None}))
    return kind


def small_tree(lm: PreTrainedModel) -> tuple[TreeForward, list[int], list[int], torch.Tensor]:
    """A forward of `lm` over three tokens and a root with two branches of two nodes each.

    Returns it with a text of seven tokens (those three, the root, the second branch, and one that may follow), the path
    of the root and that branch, and their logits, (3, V).
    """
    first, second, third, root, left, right, last, after = _tokens(lm)
    text = [first, second, third, root, right, last, after]
    forward = TreeForward(Model("", lm, cast(Any, None), 0, ""))
    paths = Paths(root, text[:3], 1)
    nodes = [0, paths.child(0, left), paths.child(0, right)]
    nodes += [paths.child(nodes[1], last), paths.child(nodes[2], last)]
    logits = forward(text[:3], paths, nodes).clone()
    return forward, text, [nodes[0], nodes[2], nodes[4]], logits[[0, 2, 4]]


def _difference(lm: PreTrainedModel) -> str:
    """How the scores in a tree differ from the model's own; "" where they agree."""
    forward, text, path, scores = small_tree(lm)
    forward.commit(path)
    scores = torch.cat([scores, forward(text[:-1], Paths(text[-1], text[:-1], 1), [0])])
    own = lm(torch.tensor([text], device=lm.device), use_cache=False).logits[0, -len(scores) :]
    if scores.shape != own.shape:
        return f"its scores have the shape {tuple(scores.shape)}, not {tuple(own.shape)}"
    scores, own = scores.nan_to_num().double(), own.nan_to_num().double()
    spread = float((own - own.mean(dim=-1, keepdim=True)).abs().max())
    apart = float((scores - own).abs().max())
    if apart > tolerance(lm.dtype) * spread:
        return f"a token's scores there are {apart / spread:.2g} of their spread away from those that it has alone"
    return ""


def tolerance(dtype: torch.dtype) -> float:
    """The rounding that is allowed for, as a share of the scores' spread."""
    return max(1e-3, 16 * torch.finfo(dtype).eps)


def _tokens(lm: PreTrainedModel) -> list[int]:
    """Eight token ids from all over the vocabulary, none of which a configuration gives a meaning of its own."""
    embeddings: Any = lm.get_input_embeddings()
    config, size = text_config(lm), embeddings.weight.shape[0]
    special = {value for settings in (lm.config, config) for name, value in vars(settings).items() if "token" in name
               and isinstance(value, int)}  # fmt: skip
    free = [token for token in range(0, size, max(1, size // 64)) if token not in special]
    return [free[i * len(free) // 8] for i in range(8)]


def _advice(lm: PreTrainedModel) -> str:
    attention, config = lm.config._attn_implementation, text_config(lm)
    if lm.training:
        return "It is in training mode: call its eval()"
    if attention not in ("sdpa", "eager"):
        return f"{attention} attention takes no tree mask: load it with attn_implementation='sdpa'"
    kinds: Any = getattr(config, "layer_types", None) or []
    if any("linear" in kind or kind in ("conv", "mamba") for kind in kinds) or any(
        hasattr(config, mark) for mark in RECURRENT
    ):
        return "It keeps a recurrent or compressed state, which two branches cannot share: use a full-attention model"
    return "Use another causal LM with full attention"
