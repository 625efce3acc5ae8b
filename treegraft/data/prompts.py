"""Prompt files: JSON Lines with `turns`, `messages` or `prompt`, and the prompts that the package ships."""

import codecs
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from treegraft.data.files import Location, location
from treegraft.runtime.text import not_unicode

SHIPPED = Path(__file__).parent / "prompts"


class PromptError(ValueError):
    """A prompt file or line that cannot be used; the message names the file and the line."""


@dataclass(frozen=True)
class Prompt:
    """One conversation: user `turns` that the model answers one by one, ready `messages`, or raw `text`.

    `id` is unique within its file; `file` is the file's base name without suffix.
    """

    file: str
    id: str
    turns: tuple[str, ...] = ()
    messages: tuple[dict[str, str], ...] = ()
    text: str | None = None

    def sha256(self) -> str:
        """A hash of what is asked."""
        return hashlib.sha256(json.dumps([self.turns, self.messages, self.text]).encode()).hexdigest()


def shipped(split: str) -> list[Path]:
    """The package's own prompt files of a split, "train" or "bench"."""
    return sorted((SHIPPED / split).glob("*.jsonl"))


def read_prompts(paths: Iterable[str | Location], limit: int | None = None) -> list[Prompt]:
    """The prompts of all files in order, the first `limit` of each; raises PromptError naming file and line."""
    prompts: list[Prompt] = []
    seen: set[tuple[str, str]] = set()
    for path in map(location, paths):
        if path.stem == "overall":
            raise PromptError(f"{path}: rename it; figures over all files go by the name of overall")
        if flaw := not_unicode(path.stem):
            raise PromptError(f"{str(path)!r}: rename it; its name {flaw}")
        count = 0
        for number, line in enumerate(_lines(path), start=1):
            if not line.strip() or count == limit:
                continue
            prompt = _parse(path, number, line)
            if (prompt.file, prompt.id) in seen:
                raise PromptError(f"{path}, line {number}: id {prompt.id!r} was used before in a file of this name")
            seen.add((prompt.file, prompt.id))
            prompts.append(prompt)
            count += 1
    if not prompts:
        raise PromptError(f"no prompts in {', '.join(map(str, paths)) or 'an empty list of files'}")
    return prompts


def take_shard(prompts: list[Prompt], shard: str) -> list[Prompt]:
    """The i-th of n equal runs of `prompts`, for `shard` = "i/n" with 1 <= i <= n; ValueError for anything else.

    The n runs in order are all prompts, so that logs merged in that order are as one made in one go.
    """
    index, _, count = shard.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise ValueError(f"--shard {shard!r}: give i/n with i from 1 to n, such as 1/8")
    begin, end = ((int(index) - 1 + more) * len(prompts) // int(count) for more in (0, 1))
    return prompts[begin:end]


def _lines(path: Location) -> list[bytes]:
    """The lines of a prompt file; raises PromptError where it cannot be read, or is not UTF-8 as a whole."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PromptError(f"{path}: cannot be read ({type(error).__name__}: {error})") from error
    if (encoding := json.detect_encoding(content)) not in ("utf-8", "utf-8-sig"):
        raise PromptError(f"{path}: written in {encoding.upper()}; save it as UTF-8")
    return re.split(rb"\r\n|\r|\n", content.removeprefix(codecs.BOM_UTF8))


def _parse(path: Location, number: int, line: bytes) -> Prompt:
    where = f"{path}, line {number}"
    try:
        data = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise PromptError(f"{where}: byte {line[error.start]:#x} is not UTF-8; save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where}: not JSON ({error})") from error
    if not isinstance(data, dict):
        raise PromptError(f"{where}: needs a JSON object with `turns`, `messages` or `prompt`")
    data = _given(data)
    for name in ("id", "question_id", "turns", "messages", "prompt"):
        if flaw := not_unicode(data.get(name)):
            raise PromptError(f"{where}: `{name}` {flaw}")
    fields: dict[str, Any] = {"file": path.stem, "id": str(data.get("id", data.get("question_id", number)))}
    if "turns" in data:
        turns = data["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
            raise PromptError(f"{where}: `turns` must be a non-empty list of non-empty strings")
        return Prompt(**fields, turns=tuple(turns))
    if "messages" in data:
        messages = data["messages"]
        good = bool(messages) and isinstance(messages, list) and all(map(_is_message, messages))
        if not good:
            raise PromptError(f"{where}: `messages` must be a list of objects with `role` and `content` strings")
        return Prompt(**fields, messages=tuple(map(_given, messages)))
    if isinstance(data.get("prompt"), str) and data["prompt"]:
        return Prompt(**fields, text=data["prompt"])
    raise PromptError(f"{where}: needs `turns`, `messages` or a non-empty `prompt`")


def _given(data: dict[str, Any]) -> dict[str, Any]:
    """Without the fields that are null, which is as good as absent."""
    return {name: value for name, value in data.items() if value is not None}


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


class Conversation:
    """The token ids of a prompt turn by turn, with the model's own earlier answers before each."""

    def __init__(self, prompt: Prompt, tokenizer: PreTrainedTokenizerBase):
        self.prompt = prompt
        self.tokenizer = tokenizer
        self.messages: list[dict[str, str]] = list(prompt.messages)
        self.turns = len(prompt.turns) or 1

    def ids(self, turn: int) -> list[int]:
        """Token ids to answer at `turn` (0-based); raises PromptError where there are none."""
        where = f"{self.prompt.file}/{self.prompt.id}"
        if flaw := not_unicode(astuple(self.prompt)):
            raise PromptError(f"{where}: {flaw}")
        if self.prompt.text is not None:
            ids: Any = self.tokenizer(self.prompt.text)["input_ids"]
        else:
            if self.prompt.turns:
                self.messages.append({"role": "user", "content": self.prompt.turns[turn]})
            if not self.tokenizer.chat_template:
                raise PromptError(
                    f"{where}: the tokenizer has no chat template; give raw text instead (`prompt` in a file, --raw)"
                )
            try:
                encoded: Any = self.tokenizer.apply_chat_template(
                    self.messages, add_generation_prompt=True, return_dict=True
                )
            except Exception as error:  # a template's code may raise anything
                told = " ".join(str(error).split())
                raise PromptError(f"{where}: the chat template refuses these messages: {told}") from error
            ids = encoded["input_ids"]
        if not ids:
            raise PromptError(f"{where}: the prompt is empty once tokenised")
        return list(ids)

    def answer(self, tokens: list[int]) -> str:
        """Take the model's answer into the conversation; returns its text."""
        text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        self.messages.append({"role": "assistant", "content": text})
        return text
