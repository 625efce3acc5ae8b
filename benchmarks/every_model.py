"""Every causal LM type of transformers, tiny and random: is its text the model's own in trees, or refused?

    python benchmarks/every_model.py [TYPE...] [--dtype bfloat16]

The model's own text is `generate`'s; in 16 bits, where that sums in another order, the one-token loop's.
Prints a line a type: equal, refused (why), not built (why), or WRONG and CRASHED, which must not be, and counts them.
"""

import argparse
import random
import warnings
from collections import Counter
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from treegraft.runtime.attention import COARSE
from treegraft.runtime.decode import AUTOREGRESSIVE, ContextError, Plan, decode
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.model import Model, ModelError, context_limit, rope_parameters, text_config
from treegraft.runtime.models import wrap_model
from treegraft.runtime.scheduler import Mask
from treegraft.runtime.size import Cut
from treegraft.runtime.ties import compare_texts

VOCABULARY, WINDOW, LONGEST = 200, 40, 128
TOKENS = 20
MASKS = (0b000, 0b010, 0b111)
DRAFTING = Drafting(depth=3, width=3, children=3, budget=16)
# What makes a configuration tiny, by the names that configurations use.
TINY = {
    64: "hidden_size d_model n_embd dim embedding_size word_embed_proj_dim hidden_dim lru_width model_dim "
        "attention_hidden_size moe_hidden_size attn_hidden_size",
    96: "intermediate_size ffn_dim n_inner d_ff dim_ff ffn_hidden_size mlp_dim decoder_ffn_dim intermediate_dim ",
    32: "moe_intermediate_size expert_intermediate_size shared_expert_intermediate_size "
        "ffn_hidden_size_moe q_lora_rank shared_intermediate_size hidden_size_per_layer_input index_head_dim "
        "moe_shared_intermediate_size",
    16: "head_dim v_head_dim qk_nope_head_dim kv_lora_rank attention_head_dim mamba_d_head linear_key_head_dim "
        "linear_value_head_dim global_head_dim mamba_head_dim swa_head_dim dim_head kv_channels",
    8: "qk_rope_head_dim rotary_dim mamba_d_state state_size mamba_n_groups n_groups ssm_state_size altup_num_inputs_",
    4: "num_attention_heads n_head n_heads num_heads num_experts n_routed_experts num_local_experts moe_num_experts "
       "linear_num_key_heads linear_num_value_heads decoder_attention_heads mamba_n_heads mamba_num_heads "
       "num_hidden_layers n_layer n_layers num_layers num_decoder_layers decoder_layers laurel_rank index_n_heads "
       "encoder_layers encoder_attention_heads index_topk_ num_global_attention_heads",
    2: "num_key_value_heads num_experts_per_tok moe_topk num_experts_per_token moe_k num_kv_heads "
       "num_global_key_value_heads moe_top_k top_k_experts",
    1: "n_group topk_group first_k_dense_replace num_nextn_predict_layers",
    VOCABULARY: "vocab_size vocab_size_per_layer_input entity_vocab_size decoder_vocab_size",
    LONGEST: "max_position_embeddings n_positions max_seq_len max_sequence_length n_ctx seq_length",
    WINDOW: "sliding_window attention_chunk_size window_size sliding_window_size keep_window_size "
            "attention_window_size",
}  # fmt: skip
SIZES = {name: size for size, names in TINY.items() for name in names.split()}


def shrink(config: Any) -> Any:
    """Make a configuration, and its parts, tiny in place; returns it."""
    for name, value in list(vars(config).items()):
        if isinstance(value, dict) or name.startswith("_"):
            continue
        if hasattr(value, "to_dict"):
            shrink(value)
        elif name in SIZES and not isinstance(value, list | str) and (value is not None or "window" not in name):
            setattr(config, name, SIZES[name])
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            setattr(config, name, 1)
        elif isinstance(value, list) and name.endswith(("layer_types", "layers_block_type")):
            kinds = list(dict.fromkeys(value))
            setattr(config, name, [kinds[i % len(kinds)] for i in range(SIZES["num_hidden_layers"])])
    for rope in rope_parameters(config):
        rope["rope_theta"] = rope.get("rope_theta") or 10000.0
    for target, source in getattr(config, "attribute_map", {}).items():
        if target in SIZES and not isinstance(getattr(config, source, None), list):
            setattr(config, source, SIZES[target])
    return config


def build(kind: str, dtype: torch.dtype) -> Any:
    """A random model of a type, far from flat; raises what its configuration or code raises."""
    config = shrink(AutoConfig.for_model(kind))
    if hasattr(config, "is_decoder") and not config.is_encoder_decoder:
        config.is_decoder = True
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > 50_000_000:
        raise ValueError(f"{size:,} parameters by the configuration that this script makes")
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config).to(dtype).eval().requires_grad_(False)
    for name, weight in lm.named_parameters():
        if weight.dim() > 1:
            weight.normal_(0.0, 2 / weight.shape[-1] ** 0.5 if "embed" not in name else 1.0)
    lm.generation_config.eos_token_id = lm.generation_config.pad_token_id = None
    return lm


def prompts(longest: int) -> list[list[int]]:
    """Prompts within the window, and some that with their answer, or by themselves, go beyond it."""
    source = random.Random(0)
    return [[source.randrange(10, VOCABULARY) for _ in range(n)] for n in (1, 5, 9, 13, 60) if n < longest]


def attempt(kind: str, dtype: torch.dtype) -> tuple[str, str]:
    """What became of a type, and why."""
    try:
        lm = build(kind, dtype)
    except Exception as error:
        return "not built", f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    try:
        model = wrap_model(lm)
    except ModelError as error:
        return "refused", str(error).partition("model ")[2][:300]
    longest = context_limit(text_config(lm))
    refused = compared = 0
    for prompt in prompts(LONGEST - TOKENS - DRAFTING.depth):
        ids = torch.tensor([prompt])
        try:
            reference = lm.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS,
                                    pad_token_id=0)[0, len(prompt) :].tolist()  # fmt: skip
        except Exception as error:
            return "not built", f"its own generate: {type(error).__name__}: {' '.join(str(error).split())[:120]}"
        for mask in MASKS:
            plan = Plan(bin(mask), Mask(mask), DRAFTING, Cut("none"))
            try:
                tokens = decode(model, model, prompt, plan, TOKENS).tokens
            except ContextError:
                refused += 1
                continue
            except Exception as error:
                return "CRASHED", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            compared += 1
            if dtype in COARSE:
                if tokens != decode(model, None, prompt, AUTOREGRESSIVE, TOKENS).tokens:
                    return "WRONG", f"after {len(prompt)} tokens under {bin(mask)}"
            elif not same(model, prompt, tokens, reference):
                return "WRONG", f"after {len(prompt)} tokens under {bin(mask)}"
    if not compared:
        return "refused", f"a context of {longest} tokens"
    return "equal", f"up to {longest} tokens of context" if refused else ""


def same(model: Model, prompt: list[int], tokens: list[int], reference: list[int]) -> bool:
    return tokens == reference or compare_texts(model, prompt, tokens, reference) == "tie"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("kinds", nargs="*", metavar="TYPE", help="transformers model types; by default all")
    parser.add_argument("--dtype", default="float32")
    asked = parser.parse_args()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts = Counter[str]()
    for kind in asked.kinds or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        what, why = attempt(kind, getattr(torch, asked.dtype))
        counts[what] += 1
        print(f"{kind:28} {what:10} {why}", flush=True)
    print(", ".join(f"{what}: {count}" for what, count in counts.most_common()))


if __name__ == "__main__":
    main()
