"""Converted models: plain safetensors folders below one cache folder, each made once and put in place whole."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from treegraft.runtime.model import ModelError

FORMAT = 2  # raised when conversion changes: what an older version made may be wrong, and is not read


def cache_folder() -> Path:
    """Where converted models live: `$TREEGRAFT_CACHE`, else `$XDG_CACHE_HOME/treegraft`, else `~/.cache/treegraft`.

    Raises ModelError for a user without a home directory who names no folder.
    """
    try:
        if folder := os.environ.get("TREEGRAFT_CACHE"):
            return Path(folder).expanduser()
        if os.path.isabs(base := os.environ.get("XDG_CACHE_HOME", "")):  # its specification: others are ignored
            return Path(base) / "treegraft"
        return Path.home() / ".cache" / "treegraft"
    except RuntimeError as error:
        raise ModelError(
            "converted models have no place, since you have no home directory; set TREEGRAFT_CACHE to a folder"
        ) from error


def converted(key: str, make: Callable[[Path], None]) -> Path:
    """The cache folder of `key`, made by `make(folder)` the first time; raises ModelError where it cannot be."""
    folder = cache_folder() / f"{key}-{FORMAT}"
    try:
        if not folder.exists():
            _make(folder, make)
        check_readable(folder)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"the folder of converted models, {folder.parent}, cannot be used ({error}); see to its permissions (its "
            "owner lets others read by `chmod -R a+rX`) and its free space, or set TREEGRAFT_CACHE to another folder"
        ) from error
    return folder


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}-{uuid4().hex[:8]}")
    aside.mkdir()
    try:
        make(aside)
        for path in aside.rglob("*"):
            if path.is_file():  # safetensors lets nobody else read, whatever the umask, which made the folder
                path.chmod(aside.stat().st_mode & 0o666)
        aside.rename(folder)
    except OSError:
        if not folder.exists():  # else another process was faster, and its copy is as good
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def check_readable(folder: Path) -> None:
    """Raise PermissionError, with the path, where a folder or a file in it cannot be read: readers say "absent"."""
    for path in folder.iterdir():
        if path.is_file():
            path.open("rb").close()


def save_plain(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a model, its tokenizer and its generation settings to `folder`."""
    lm.config.save_pretrained(folder)
    lm.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tied = "lm_head.weight" if lm.config.tie_word_embeddings else None
    state = {name: tensor.contiguous() for name, tensor in lm.state_dict().items() if name != tied}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
