"""A GGUF file, or a split one's shards, dequantised into a plain folder: every weight comes from the file, or none."""

import copy
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter, Keys
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from treegraft.runtime.converted import converted, save_plain
from treegraft.runtime.model import ModelError

SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
# How every Llama 3.1 to 3.3 stretches its encoding, but for the factor; its GGUF files hold the factors by frequency.
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
ENDS = (Keys.Tokenizer.EOS_ID, Keys.Tokenizer.EOT_ID, Keys.Tokenizer.EOM_ID)


def gguf_folder(name: str) -> Path:
    """The folder that a GGUF file, or any shard of a split one, is converted into, once.

    Raises ModelError, with nothing kept, where a shard is missing or the file does not hold the whole model.
    """
    shards = _shards(Path(name).absolute())
    try:
        found = [(path, path.stat()) for path in shards]
    except FileNotFoundError as error:
        beside = f"; put all {len(shards)} shards into one folder" if len(shards) > 1 else ""
        raise ModelError(f"model {name!r}: no such file as {error.filename}{beside}") from error
    except OSError as error:
        raise ModelError(f"model {name!r}: cannot be read ({error})") from error
    files = " ".join(f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in found)
    tag = hashlib.sha256(files.encode()).hexdigest()[:12]
    return converted(f"{shards[0].stem}-{tag}", lambda folder: convert_gguf(shards, folder))


def _shards(path: Path) -> list[Path]:
    """The files that a GGUF file's name speaks of, in order: itself alone, or all of `NAME-00001-of-0000N.gguf`."""
    split = SHARD.fullmatch(path.name)
    if not split or not 1 <= int(split[2]) <= int(split[3]):
        return [path]
    return [path.with_name(f"{split[1]}-{i:05d}-of-{split[3]}{split[4]}") for i in range(1, int(split[3]) + 1)]


def convert_gguf(shards: list[Path], folder: Path) -> None:
    """Dequantise a GGUF file into a plain safetensors folder, since reading GGUF takes half a minute each time."""
    readers = [_read(path) for path in shards]
    name = f"model {str(shards[0])!r}"
    _check_split(shards, readers)
    path = shards[0]
    if len(shards) > 1:  # transformers reads one file
        path = folder / "joined.gguf"
        try:
            _join(readers, path)
        except (KeyError, ValueError) as error:
            raise ModelError(
                f"{name}: its {len(shards)} shards cannot be joined ({error}); fetch them again"
            ) from error
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
        )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # the reader raises whatever its parser met
        raise ModelError(f"{name}: cannot be read as GGUF ({error})") from error
    finally:
        if path.parent == folder:
            path.unlink(missing_ok=True)
    lm, found = loaded
    if unfilled := sorted({*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}):
        raise ModelError(
            f"{name}: it lacks the weights {unfilled[0]}, or has them in another shape ({len(unfilled)} such in all); "
            "it is not a whole model that transformers knows"
        )
    _check_size(name, lm, readers)
    if hasattr(lm.config, "quantization_config"):
        del lm.config.quantization_config  # the weights written below are plain floats
    lm.config.architectures = [type(lm).__name__]
    if stretched := _stretched(name, lm, readers):
        lm.config.rope_parameters = {**(lm.config.rope_parameters or {}), **stretched}
    if ends := _end_tokens(lm, readers[0]):
        lm.generation_config.eos_token_id = ends
    save_plain(lm, tokenizer, folder)


def _read(path: Path) -> GGUFReader:
    try:
        return GGUFReader(path)
    except OSError as error:
        raise ModelError(f"model {str(path)!r}: cannot be read ({error})") from error
    except Exception as error:  # whatever its parser met
        raise ModelError(
            f"model {str(path)!r}: cannot be read as GGUF, it is cut short or damaged ({error}); fetch it again"
        ) from error


def _field(reader: GGUFReader, key: str, default: Any) -> Any:
    return reader.fields[key].contents() if key in reader.fields else default


def _check_split(shards: list[Path], readers: list[GGUFReader]) -> None:
    """Raise ModelError where the shards' own count contradicts their names."""
    for index, (path, reader) in enumerate(zip(shards, readers)):
        count = _field(reader, Keys.Split.LLM_KV_SPLIT_COUNT, 1) or 1  # 0 in shards that were joined
        number = _field(reader, Keys.Split.LLM_KV_SPLIT_NO, 0)
        if (number, count) != (index, len(shards)):
            raise ModelError(
                f"model {str(path)!r}: it says that it is shard {number + 1} of {count}; put all shards into one "
                f"folder, with names that end in -{number + 1:05d}-of-{count:05d}.gguf and so on"
            )
    held = sum(len(reader.tensors) for reader in readers)
    if (said := _field(readers[0], Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT, held)) != held:
        raise ModelError(f"model {str(shards[0])!r}: its shards hold {held} tensors, not the {said} that they speak of")


def _join(readers: list[GGUFReader], path: Path) -> None:
    """Write shards as the one file that they were split from."""
    first = readers[0]
    architecture = first.fields[Keys.General.ARCHITECTURE].contents()
    writer = GGUFWriter(path, architecture, endianess=first.endianess)
    writer.data_alignment = first.alignment
    for field in first.fields.values():
        own = field.name.startswith(("GGUF.", "split.")) or field.name == Keys.General.ARCHITECTURE
        if own or not field.data:  # an empty list cannot be written
            continue
        of = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], of)
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    for tensor in tensors:
        data = tensor.data
        writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(tensor.data, tensor_endianess=first.endianess)
    finally:
        writer.close()


def _check_size(name: str, lm: PreTrainedModel, readers: Iterable[GGUFReader]) -> None:
    """Raise ModelError unless model and file hold equally many numbers.

    transformers drops in silence what the architecture has no place for (biases, say), and takes one half of a weight
    that the file keeps in two (a gate's) for the whole.
    """
    held = 0
    for reader in readers:
        for tensor in reader.tensors:
            tied = tensor.name == "output.weight" and lm.config.tie_word_embeddings
            if not tied and not tensor.name.startswith("rope_"):  # not weights, but what follows from the configuration
                held += int(tensor.n_elements)
    filled = sum({weight.data_ptr(): weight.numel() for weight in lm.state_dict().values()}.values())
    if held != filled:
        raise ModelError(
            f"{name}: it holds {held} weights, but transformers makes a {type(lm).__name__} of {filled} from it, which "
            "would be another model; take the original in place of the GGUF file"
        )


def _stretched(name: str, lm: PreTrainedModel, readers: list[GGUFReader]) -> dict[str, Any]:
    """What the file says of a stretched rotary encoding, in transformers' words; it reads none of that for most models.

    Raises ModelError for one that these words do not cover.
    """
    first = readers[0]
    architecture = first.fields[Keys.General.ARCHITECTURE].contents()

    def said(key: str, default: Any) -> Any:
        return _field(first, key.format(arch=architecture), default)

    factors = {tensor.name: torch.tensor(tensor.data) for reader in readers for tensor in reader.tensors
               if tensor.name.startswith("rope_") and bool((tensor.data != 1).any())}  # fmt: skip
    kind, factor = said(Keys.Rope.SCALING_TYPE, "none"), float(said(Keys.Rope.SCALING_FACTOR, 1.0))
    original = int(said(Keys.Rope.SCALING_ORIG_CTX_LEN, 0))
    if factors.keys() == {"rope_freqs.weight"} and lm.config.model_type == "llama":
        own = factors["rope_freqs.weight"].float()
        stretched = LLAMA3 | {"factor": float(own.max())}
        plain, _ = ROPE_INIT_FUNCTIONS["linear"](_with_rope(lm, {"rope_type": "linear", "factor": 1.0}), "cpu")
        wanted, _ = ROPE_INIT_FUNCTIONS["llama3"](_with_rope(lm, stretched), "cpu")
        if torch.allclose(plain / own, wanted, rtol=1e-3):
            return stretched
    elif not factors and (kind == "none" or factor == 1.0 or lm.config.model_type == "gpt_oss"):
        return {}
    elif not factors and kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    elif not factors and kind == "yarn" and original:
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ModelError(
        f"{name}: it stretches its position encoding ({', '.join(factors) or kind}) in a way that transformers does "
        "not read from GGUF; take the original in place of the GGUF file"
    )


def _with_rope(lm: PreTrainedModel, rope: dict[str, Any]) -> Any:
    config = copy.deepcopy(lm.config)
    config.rope_parameters = {**config.rope_parameters, **rope}
    return config


def _end_tokens(lm: PreTrainedModel, reader: GGUFReader) -> list[int]:
    """All ids that the file says end a text, a turn or a message; a list that transformers knows of is kept."""
    known = lm.generation_config.eos_token_id
    ends = set(known if isinstance(known, list) else [])  # a single one is the file's, or just any llama's
    ends |= {_field(reader, key, -1) for key in ENDS}
    return sorted(end for end in ends if 0 <= end < lm.config.vocab_size)
