"""Tiny random causal LMs of five architectures, and the one rule by which two texts count as the same."""

import copy
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from treegraft.runtime.models import Model, load_model
from treegraft.runtime.sampling import Chooser
from treegraft.runtime.ties import compare_texts

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "gpt_neox")
VOCABULARY = 200

TIES: list[tuple[str, list[int]]] = []  # forgiven differences: model name and prompt


def tokenizer(size: int = VOCABULARY, swap: tuple[int, int] | None = None) -> PreTrainedTokenizerFast:
    """Words t0 t1 ...; the word of token id i is `t{i}`, save that `swap` exchanges two ids."""
    ids = list(range(size))
    if swap:
        ids[swap[0]], ids[swap[1]] = ids[swap[1]], ids[swap[0]]
    inner = Tokenizer(WordLevel({f"t{word}": token for word, token in enumerate(ids)}, unk_token="t0"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="t0")


def config(kind: str, size: int = VOCABULARY, hidden: int = 64, layers: int = 2, **more):  # type: ignore[no-untyped-def]
    """A configuration of architecture `kind` (a transformers model type) with no end of sequence."""
    common = {
        "vocab_size": size, "hidden_size": hidden, "intermediate_size": hidden * 3 // 2, "num_hidden_layers": layers,
        "num_attention_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    if kind != "gpt_neox":
        common["num_key_value_heads"] = 2
    if kind == "qwen3":
        common["head_dim"] = hidden // 4
    return AutoConfig.for_model(kind, **{**common, **more})


def save_lm(folder: Path, settings, seed: int, scale: float = 2.0, **words) -> Path:  # type: ignore[no-untyped-def]
    """Write a random model to `folder`; `scale` multiplies its matrices, so that its text is far from flat."""
    torch.manual_seed(seed)
    lm = AutoModelForCausalLM.from_config(settings)
    with torch.no_grad():
        for name, weight in lm.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, scale / weight.shape[-1] ** 0.5 if "embed" not in name else 1.0)
    lm.save_pretrained(folder)
    tokenizer(settings.get_text_config().vocab_size, **words).save_pretrained(folder)
    return folder


def save_noised(folder: Path, source: Model, noise: float, seed: int) -> Path:
    """Write a drafter to `folder`: `source` with Gaussian noise of `noise` times each matrix's own spread."""
    lm = noised(source.lm, noise, seed)
    lm.save_pretrained(folder)
    source.tokenizer.save_pretrained(folder)
    return folder


def make_pair(folder: Path, kind: str, noise: float = 0.06, seed: int = 0) -> tuple[Model, Model]:
    """A tiny target of architecture `kind` and its medium drafter, written below `folder` and loaded from there."""
    target = load_model(str(save_lm(folder / f"{kind}-target", config(kind), seed)))
    return target, load_model(str(save_noised(folder / f"{kind}-medium", target, noise, seed + 1)))


def random_lm(kind: str, **settings) -> PreTrainedModel:  # type: ignore[no-untyped-def]
    """A random model of a transformers type, tiny by its own names for sizes, far from flat."""
    torch.manual_seed(0)
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=VOCABULARY, **settings, **tokens))
    with torch.no_grad():
        for name, weight in lm.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 2 / weight.shape[-1] ** 0.5 if "embed" not in name else 1.0)
    return lm.eval().requires_grad_(False)


def noised(lm: PreTrainedModel, noise: float = 0.06, seed: int = 1) -> PreTrainedModel:
    """A copy of `lm` with Gaussian noise of `noise` times each matrix's own spread: a drafter for it."""
    lm = copy.deepcopy(lm)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in lm.parameters():
            if weight.dim() > 1:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return lm


def prompts(count: int, size: int = VOCABULARY, seed: int = 0) -> list[list[int]]:
    """Random prompts of 1 to 24 tokens; the first has one token, and odd ones repeat themselves as text does."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        length = 1 if index == 0 else int(torch.randint(1, 25, (), generator=generator))
        tokens = torch.randint(0, size, (length,), generator=generator).tolist()
        made.append((tokens[: (length + 1) // 2] * 2)[:length] if index % 2 else tokens)
    return made


def greedy(model: Model, prompt: list[int], count: int) -> list[int]:
    """The reference: transformers' own greedy generation, end of sequence included."""
    ids = torch.tensor([prompt], device=model.device)
    out = model.lm.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return out[0, len(prompt) :].tolist()


def same_text(
    model: Model, prompt: list[int], ours: list[int], reference: list[int], chooser: Chooser | None = None
) -> bool:
    """Whether two answers are the same up to a float tie (see `compare_texts`), which is then added to TIES."""
    verdict = compare_texts(model, prompt, ours, reference, chooser)
    if verdict == "tie":
        TIES.append((model.name, prompt))
    return verdict in ("equal", "tie")
