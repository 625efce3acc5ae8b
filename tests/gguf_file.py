"""Real GGUF files of a tiny random llama, whole, split or wanting."""

from pathlib import Path
from typing import Any

import gguf
import torch
from tiny import config
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

TOKENS = [*bytes_to_unicode().values(), "Ġt", "<|end|>", "<|turn|>", "<|message|>"]
END, TURN, MESSAGE = range(257, 260)
LAYERS = 2


def tiny_llama(**settings: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config("llama", len(TOKENS), layers=LAYERS, **settings))
    with torch.no_grad():
        for weight in lm.parameters():
            weight.normal_(1.0 if weight.dim() == 1 else 0.0, 0.3)
    return lm


def tensors(lm: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A llama's weights by their names in GGUF, where the halves of each rotated head are interleaved."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    heads = {"attn_q": lm.config.num_attention_heads, "attn_k": lm.config.num_key_value_heads}
    found = {}
    for own, weight in lm.state_dict().items():
        name = names.get_name(own, try_suffixes=(".weight", ".bias"))
        assert name is not None
        if count := heads.get(name.split(".")[-2]):
            halves = weight.reshape(count, 2, weight.shape[0] // count // 2, *weight.shape[1:])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        found[name] = weight
    if lm.config.tie_word_embeddings:
        del found["output.weight"]
    return found


def write_gguf(
    path: Path,
    lm: PreTrainedModel,
    without: tuple[str, ...] = (),
    split: int = 0,
    rope: dict[str, Any] | None = None,
    **ids: int,
) -> Path:
    """Write `lm`, `split` tensors a shard (0: one file), `ids` as `tokenizer.ggml.*`; the path of the first file.

    `rope` are the keys of `llama.rope.scaling.*`; `freqs` and the like, tensors `rope_freqs.weight` and the like.
    """
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split)
    writer.add_name("tiny")
    writer.add_context_length(lm.config.max_position_embeddings)
    writer.add_embedding_length(lm.config.hidden_size)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(lm.config.intermediate_size)
    writer.add_head_count(lm.config.num_attention_heads)
    writer.add_head_count_kv(lm.config.num_key_value_heads)
    writer.add_rope_dimension_count(lm.config.hidden_size // lm.config.num_attention_heads)
    writer.add_layer_norm_rms_eps(lm.config.rms_norm_eps)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * 257 + [3] * 3)
    writer.add_token_merges(["Ġ t"])
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    for key, token in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{key}", token)
    for key, value in (rope or {}).items():
        if isinstance(value, torch.Tensor):
            writer.add_tensor(f"rope_{key}.weight", value.float().numpy())
        elif isinstance(value, str):
            writer.add_string(f"llama.rope.scaling.{key}", value)
        else:
            kind = gguf.GGUFValueType.FLOAT32 if isinstance(value, float) else gguf.GGUFValueType.UINT32
            writer.add_key_value(f"llama.rope.scaling.{key}", value, kind)
    for name, weight in tensors(lm).items():
        if name not in without:
            writer.add_tensor(name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(iter(sorted(path.parent.glob(f"{path.stem}*"))))
