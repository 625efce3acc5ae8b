"""Which positions of an answer are logged."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Positions:
    """Every position, one in `every` of them, or the share `sample` of them, drawn by a hash of prompt and position.

    Written `every:N` or `sample:F`, with N >= 1 and 0 < F <= 1. Only `every:1` makes a log that replays exactly.
    """

    every: int = 1
    sample: float | None = None

    def __post_init__(self) -> None:
        if self.every < 1 or not (self.sample is None or 0 < self.sample <= 1):
            raise ValueError(f"--positions {self}: N must be at least 1, F above 0 and at most 1")

    @classmethod
    def parse(cls, text: str) -> "Positions":
        """Read `every:N` or `sample:F`; raises ValueError for anything else."""
        kind, _, number = text.partition(":")
        try:
            if kind == "every":
                return cls(every=int(number))
            if kind == "sample":
                return cls(sample=float(number))
        except ValueError as error:
            if str(error).startswith("--positions"):
                raise
        raise ValueError(f"--positions {text!r}: give every:N (every:4) or sample:F (sample:0.1)")

    def __str__(self) -> str:
        return f"every:{self.every}" if self.sample is None else f"sample:{self.sample}"

    def chosen(self, answer: str, count: int) -> list[int]:
        """Those of the positions 0 .. count - 1 that are logged; `answer` names the answer to the sample."""
        if self.sample is None:
            return list(range(0, count, self.every))
        return [position for position in range(count) if _uniform(f"{answer} {position}") < self.sample]


def _uniform(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48
