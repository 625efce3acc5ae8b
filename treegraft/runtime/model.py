"""A loaded causal LM, and what its configuration says of it."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

UNLIMITED = 2048  # tokens of context where a configuration names no limit
# What a configuration calls the tokens that a layer attends to, where those are not all.
WINDOWS = ("sliding_window", "sliding_window_size", "window_size", "keep_window_size", "attention_window_size",
           "attention_chunk_size", "index_topk")  # fmt: skip
STRETCHED = ("linear", "dynamic", "yarn", "llama3")  # position encodings that reach `factor` times as far


class ModelError(ValueError):
    """A model that cannot be loaded or cannot be used here; the message names it and says what to do."""


@dataclass
class Model:
    """A loaded causal LM, without a tokenizer where it was in memory already.

    `context` is its limit in tokens. `draft_vocabulary` (sorted token ids, shape (V,)) is None when the output head
    covers the whole vocabulary; else the head has V rows and row i scores token `draft_vocabulary[i]`.
    """

    name: str
    lm: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    context: int
    fingerprint: str
    draft_vocabulary: torch.Tensor | None = None

    @property
    def embeds(self) -> int:
        """How many token ids it embeds, from 0 on: at least those of its tokenizer, and often some of padding."""
        return int(cast(Any, self.lm.get_input_embeddings()).weight.shape[0])

    @property
    def device(self) -> torch.device:
        return self.lm.device


def text_config(lm: PreTrainedModel) -> Any:
    """The configuration that the layers over text go by: the model's own, or a part of a composite model's."""
    decoder: Any = lm.get_decoder()
    return getattr(decoder, "config", lm.config).get_text_config(decoder=True)


def context_limit(config: Any) -> int:
    """How many tokens a text with this text configuration may have, so that every layer attends to all of them."""
    limit = int(getattr(config, "max_position_embeddings", None) or UNLIMITED)
    for rope in rope_parameters(config):
        trained = int(rope.get("original_max_position_embeddings") or limit)
        if rope.get("rope_type") in STRETCHED:
            limit = max(limit, int(trained * float(rope.get("factor") or 1.0)))
        elif rope.get("rope_type") == "longrope":  # beyond this length the model changes its own short-range encoding
            limit = min(limit, trained)
    names = WINDOWS if getattr(config, "use_sliding_window", True) else WINDOWS[1:]
    windows = [getattr(config, name, None) for name in names]
    return min([limit, *(int(window) for window in windows if window)])


def rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rotary encodings of a text configuration: one, or one for each kind of layer, or none."""
    found = getattr(config, "rope_parameters", None) or {}
    by_kind = [of_kind for of_kind in found.values() if isinstance(of_kind, dict)]
    return by_kind or ([found] if found else [])
