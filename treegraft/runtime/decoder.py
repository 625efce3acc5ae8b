"""`Decoder`: load once, serve many requests."""

import reprlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from threading import Lock
from typing import Any, Self, cast

import numpy as np
import torch

from treegraft.runtime import static
from treegraft.runtime.decode import Decoded, Plan, decode_rounds
from treegraft.runtime.models import Model, ModelError, check_pair, load_model
from treegraft.runtime.monitor import Monitor, watch_drift
from treegraft.runtime.plan import as_plan, check_medium, check_models
from treegraft.runtime.sampling import Chooser, check_number
from treegraft.runtime.text import not_unicode

# A tokenizer's output is a mapping with input_ids; a row may be the only one of its container.
Ids = Sequence[int] | Sequence[Sequence[int]] | np.ndarray | torch.Tensor
Prompt = str | Sequence[Mapping[str, str]] | Ids | Mapping[str, Ids]


@dataclass
class Answer(Decoded):
    """A decoded answer with its text, special tokens left out."""

    text: str = ""


class Decoder:
    """A target and its drafters, loaded once for many requests.

    target, medium: a Model, or a name for `load_model` (loaded onto `device` in `dtype`). schedule: small, medium, a
    mask such as 0b00101, autoregressive, the path of an artifact, or a Plan. monitor: drop to cheaper drafting where it
    makes a text slower than one-token steps.

    Thread-safe: requests of several threads take turns, round by round. Raises ModelError for models that cannot be
    loaded or do not belong together, ScheduleError for a schedule that cannot be followed or an artifact's path whose
    models are others (a Plan is followed whatever it was learned with).

    >>> with Decoder("default", "default-medium", schedule="scheduler.json") as decoder:
    ...     answer = decoder.generate([{"role": "user", "content": "Why is the sky blue?"}])
    ...     print(answer.text, len(answer.rounds))
    """

    def __init__(
        self,
        target: Model | str,
        medium: Model | str | None = None,
        schedule: str | Path | Plan = "small",
        device: str = "cpu",
        dtype: str = "auto",
        monitor: bool = True,
    ):
        self.plan = as_plan(schedule)
        self.monitor = monitor
        check_medium(self.plan, medium is not None)
        loaded = load_model(target, device, dtype) if isinstance(target, str) else target
        drafter = load_model(medium, device, dtype) if isinstance(medium, str) else medium
        if loaded.tokenizer is None:
            raise ModelError(f"target {loaded.name!r} has no tokenizer to give texts by; set its `tokenizer`")
        if drafter is not None:
            check_pair(loaded, drafter)
        if not isinstance(schedule, Plan):
            check_models(self.plan, loaded, drafter)
        self._models: tuple[Model, Model | None] | None = (loaded, drafter)
        self._lock = Lock()

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        seed: int | None = 0,
    ) -> Answer:
        """Answer `prompt`: text (str) to go on with as it is, messages for the model's chat template, or token ids.

        The ids are one row in a list, an array, a tensor or what a tokenizer gives. Temperature 0 is greedy; top_k 0,
        top_p 1 and repetition_penalty 1 are off. A seed of None is a fresh one, which the answer names. Raises
        ContextError where the prompt is empty or does not fit a model's context with its answer, ScoreError where the
        target's scores for a token are no numbers, ValueError for an option out of range, a token id that the model
        does not embed, messages without a chat template, any other prompt, or a closed decoder.
        """
        stream = self.stream(prompt, max_new_tokens, temperature, top_k, top_p, repetition_penalty, seed)
        for _ in stream:
            pass
        return stream.answer

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        seed: int | None = 0,
    ) -> "Stream":
        """As `generate`, but the text comes piece by piece, one a round. To drop the stream is to end the request."""
        target, medium = self._loaded()
        count = check_number("max_new_tokens", max_new_tokens, int, 1, sys.maxsize, "a whole number of at least 1")
        chooser = Chooser.make(temperature, top_k, top_p, repetition_penalty, seed)
        ids = prompt_ids(target, prompt)
        steer = Monitor(self.plan) if self.monitor else None
        rounds = decode_rounds(target, medium, ids, self.plan, count, chooser, steer=steer)
        return Stream(self._answers(rounds, target, len(ids)))

    def close(self) -> None:
        """Let go of the models, and of device memory that nobody else uses; new requests raise from here on.

        A stream that has begun keeps its models until it ends or is dropped.
        """
        for model in self._models or ():
            if model is not None:
                static.release(model.lm)
        self._models = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _loaded(self) -> tuple[Model, Model | None]:
        if self._models is None:
            raise ValueError("the decoder is closed; make another")
        return self._models

    def _answers(self, rounds: Iterator[Decoded], target: Model, prompt_length: int) -> Iterator[Answer]:
        """The answer after every round, and once more when it is complete."""
        shown = text = ""
        while True:
            with self._lock:
                decoded = next(rounds, None)
            if decoded is None:
                break
            last = decoded
            # No clean-up of spaces: it would take back what was streamed.
            text = str(
                target.tokenizer.decode(decoded.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            )
            if not text.endswith("\ufffd"):  # else half a character: wait for the rest of its bytes
                shown = text
            yield Answer(**vars(decoded), text=shown)
        watch_drift(last, self.plan, prompt_length)
        yield Answer(**vars(last), text=text)


class Stream(Iterator[str]):
    """The pieces of an answer's text; `answer` is the answer as far as it has come, with what the rounds did."""

    def __init__(self, answers: Iterator[Answer]):
        self.answer = Answer([])
        self._answers = answers
        self._error: Exception | None = None

    def __next__(self) -> str:
        if self._error is not None:  # a stream that broke off has not ended
            raise self._error
        shown = len(self.answer.text)
        try:
            self.answer = next(self._answers)
        except StopIteration:
            raise
        except Exception as error:
            self._error = error
            raise
        return self.answer.text[shown:]


def prompt_ids(model: Model, prompt: Prompt) -> list[int]:
    """The token ids of a prompt (see `Decoder.generate`); raises ValueError, by name, for what is none."""
    if isinstance(prompt, str):
        _check_text(prompt)
        ids = cast(Any, model.tokenizer)(prompt)["input_ids"]
    elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        ids = _templated(model, prompt)
    else:
        ids = _given_ids(prompt)
    # On a GPU a wrong index would end the whole process's use of it.
    size = model.embeds
    if wrong := [token for token in ids if not 0 <= token < size]:
        raise ValueError(f"token id {wrong[0]} is not one of {model.name!r}, which embeds {size}")
    return list(ids)


def _templated(model: Model, messages: Sequence[Any]) -> list[int]:
    """The ids of messages, by the model's chat template."""
    for index, message in enumerate(messages):
        keys = ("role", "content")
        if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in keys):
            raise ValueError(f"message {index} is {reprlib.repr(message)}; it needs `role` and `content` strings")
    if not model.tokenizer.chat_template:
        raise ValueError(f"{model.name!r} has no chat template: give raw text (a str, --raw) instead of messages")
    _check_text(messages)
    try:
        chat: Any = model.tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, return_dict=True
        )
    except Exception as error:  # a template's code may raise anything
        raise ValueError(
            f"the chat template of {model.name!r} refuses these messages: {' '.join(str(error).split())}"
        ) from error
    return list(chat["input_ids"])


def _given_ids(prompt: Any) -> list[int]:
    """The token ids of a row, or of what a tokenizer gives."""
    mask = None
    if isinstance(prompt, Mapping):
        if "input_ids" not in prompt:
            raise _no_prompt(f"{reprlib.repr(prompt)}, without input_ids")
        prompt, mask = prompt["input_ids"], prompt.get("attention_mask")
    ids = []
    for index, token in enumerate(_row(prompt)):
        number = token.item() if isinstance(token, torch.Tensor | np.generic) else token
        if not isinstance(number, Integral) or isinstance(number, bool):
            raise _no_prompt(f"a row whose item {index} is {reprlib.repr(token)}, a {type(number).__name__}")
        ids.append(int(number))
    if mask is not None and not all(_row(mask)):
        raise _no_prompt("padded (its attention_mask holds a 0)")
    return ids


def _check_text(prompt: Any) -> None:
    if flaw := not_unicode(prompt):
        raise ValueError(f"the prompt {flaw}")


def _row(given: Any) -> list[Any]:
    """What a container holds that is a row, or holds one row alone."""
    row = _items(given)
    if row is None:
        raise _no_prompt(f"{reprlib.repr(given)}, a {type(given).__name__}")
    inner = [_items(item) for item in row]
    if len(inner) == 1 and inner[0] is not None:
        row, inner = inner[0], [_items(item) for item in inner[0]]
    if rows := sum(items is not None for items in inner):
        raise _no_prompt(f"{rows} rows" if rows > 1 else "a row that holds another")
    return row


def _items(given: Any) -> list[Any] | None:
    """What a sequence, an array or a tensor holds; None where `given` is none of these."""
    if isinstance(given, torch.Tensor | np.ndarray):
        return list(given.tolist()) if given.ndim else None
    listed = isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray | memoryview)
    return list(given) if listed else None


def _no_prompt(given: str) -> ValueError:
    return ValueError(f"the prompt is {given}; give one text (str), messages, or one row of token ids")
