"""Reads JSON that nobody vouches for: every field is checked, and an error names the file and the field."""

import json
import math
import reprlib
from pathlib import Path
from typing import Any

MOST_CHARACTERS = 255  # of a text or a name: both are printed


class FieldError(ValueError):
    """A field at fault; the message says where it is and what it should be."""


class Field:
    """A JSON value and where it stands. Reading one that is absent or of another kind raises FieldError."""

    def __init__(self, value: Any, where: str = ""):
        self.value, self.where = value, where

    def __getitem__(self, key: str) -> "Field":
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        if key not in self.value:
            raise FieldError(f"{self._below(key)} is missing")
        return Field(self.value[key], self._below(key))

    def _below(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def wrong(self, wanted: str) -> FieldError:
        return FieldError(f"{self.where or 'the file'} is {reprlib.repr(self.value)}; it must be {wanted}")

    def fields(self) -> "dict[str, Field]":
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        return {key: Field(value, self._below(key)) for key, value in self.value.items()}

    def items(self, most: int) -> "list[Field]":
        if not isinstance(self.value, list) or len(self.value) > most:
            raise self.wrong(f"a list of at most {most}")
        return [Field(value, f"{self.where}[{index}]") for index, value in enumerate(self.value)]

    def exactly(self, count: int) -> "list[Field]":
        if not isinstance(self.value, list) or len(self.value) != count:
            raise self.wrong(f"a list of {count}")
        return self.items(count)

    def only(self, *names: str) -> None:
        """Refuse a field that is not one of `names`."""
        for name, value in self.fields().items():
            if name not in names:
                raise FieldError(f"{value.where} is not known; known here are {', '.join(names)}")

    def text(self) -> str:
        if not isinstance(self.value, str) or not self.value.isprintable() or len(self.value) > MOST_CHARACTERS:
            raise self.wrong(f"a text of at most {MOST_CHARACTERS} printable characters")
        return self.value

    def truth(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def one_of(self, *known: str) -> str:
        if not isinstance(self.value, str) or self.value not in known:
            raise self.wrong(f"one of {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}")
        return self.value

    def integer(self, low: int, high: int) -> int:
        if type(self.value) is not int or not low <= self.value <= high:
            raise self.wrong(f"an integer from {low} to {high}")
        return self.value

    def number(self, low: float = -math.inf, high: float = math.inf) -> float:
        """A finite number from low to high, as a float."""
        if type(self.value) not in (int, float) or not -1e300 < self.value < 1e300 or not low <= self.value <= high:
            bounds = "" if low == -math.inf and high == math.inf else f" from {low:g} to {high:g}"
            raise self.wrong(f"a finite number{bounds}")
        return float(self.value)


def read_text(path: Path, most: int) -> str:
    """The text of a regular file of at most `most` bytes; raises FieldError, never reading more."""
    try:
        if not path.is_file():
            raise FieldError("there is no such file")
        with path.open("rb") as file:
            raw = file.read(most + 1)
        if len(raw) > most:
            raise FieldError(f"it has more than {most} bytes, the most for such a file")
        return raw.decode()
    except (OSError, ValueError) as error:
        if isinstance(error, FieldError):
            raise
        raise FieldError(f"it cannot be read ({error})") from error


def parse_json(text: str) -> Field:
    """JSON without NaN, infinities, repeated names or names that cannot be printed; raises FieldError."""
    try:
        return Field(json.loads(text, parse_constant=_no_constant, object_pairs_hook=_object))
    except RecursionError:
        raise FieldError("it is nested too deeply") from None
    except FieldError:
        raise
    except ValueError as error:
        raise FieldError(f"it is not whole JSON ({error})") from error


def _no_constant(word: str) -> Any:
    raise FieldError(f"it holds {word}, which is no number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise FieldError(f"it holds {reprlib.repr(max(names, key=names.count))} twice in one object")
    for name in made:
        Field(name, "a name").text()
    return made
