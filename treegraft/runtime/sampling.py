"""How the target chooses a token: greedily, or with noise that depends on seed and text position alone.

Since the choice at a position does not depend on the tree, every schedule emits the same text (spec section 3).
"""

import sys
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


def gumbel(seed: int, position: int, size: int) -> np.ndarray:
    """Gumbel noise for one text position, float32 (size,): a counter-based function of (seed, position)."""
    uniform = np.random.Generator(np.random.Philox(key=[seed, position])).random(size)
    return -np.log(-np.log(np.clip(uniform, 2.0**-60, 1 - 2.0**-53))).astype(np.float32)


MOST_SEED = 2**63 - 1


class ScoreError(ValueError):
    """Scores of the target that no token can be chosen by; the message names the cause and the target's dtype."""


def check_number(name: str, value: Any, kind: type[int] | type[float], low: float, high: float, wanted: str) -> Any:
    """`value` as an int or a float from `low` to `high`; ValueError with its name for anything else."""
    of_kind = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if not of_kind or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}; it must be {wanted}")
    return kind(value)


def make_seed(seed: int | None) -> int:
    """`seed`, or where it is None a fresh one from torch's generator, so that `torch.manual_seed` decides."""
    if seed is None:
        return int(torch.randint(MOST_SEED, ()))
    wanted = "a whole number from 0 to 2**63 - 1, or None for a fresh one"
    return int(check_number("seed", seed, int, 0, MOST_SEED, wanted))


def best(scores: torch.Tensor) -> torch.Tensor:
    """The token that scores best in each row of (n, V), shape (n,); -1 where a score is NaN or all are -inf."""
    tokens = scores.argmax(dim=-1, keepdim=True)  # where there is a NaN, that one
    return torch.where(scores.gather(-1, tokens) > -torch.inf, tokens, -1)[:, 0]


@dataclass
class Chooser:
    """Chooses the target's next token after logits processors; `seed` None is greedy.

    `record`, where it is a list, gets the target's logits and the processed scores of every token chosen, each (1, V).
    `device` is where processors work; by default where the logits are.
    """

    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    seed: int | None = None
    record: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    device: torch.device | None = None

    @classmethod
    def make(
        cls,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        seed: int | None = 0,
    ) -> "Chooser":
        """As `generate` orders them: repetition penalty, temperature, top-k, top-p. Temperature 0 is greedy.

        A `seed` of None is a fresh one. Raises ValueError for an option out of range or of another kind, by name.
        """
        scores = torch.finfo(torch.float32)  # which processors divide by these
        wanted = "a number from 0, which is greedy, to 3.4e38"
        temperature = check_number("temperature", temperature, float, 0, scores.max, wanted)
        top_k = check_number("top_k", top_k, int, 0, sys.maxsize, "a whole number of at least 0, which is off")
        top_p = check_number("top_p", top_p, float, 0, 1, "a number from 0 to 1, which is off")
        wanted = "a number above 0, of which 1 is off"
        penalty = check_number("repetition_penalty", repetition_penalty, float, scores.tiny, scores.max, wanted)
        seed = make_seed(seed)
        processors = LogitsProcessorList()
        if penalty != 1.0:
            processors.append(RepetitionPenaltyLogitsProcessor(penalty))
        if temperature == 0:
            return cls(processors)
        if temperature != 1.0:
            processors.append(TemperatureLogitsWarper(temperature))
        if top_k:
            processors.append(TopKLogitsWarper(top_k))
        if top_p < 1.0:
            processors.append(TopPLogitsWarper(top_p))
        return cls(processors, seed)

    def processed(self, text: list[int], logits: torch.Tensor) -> torch.Tensor:
        """The scores after `text` with processors and without noise, from the target's logits there, both (V,)."""
        # A copy of their own, since processors may write in place.
        dtype = torch.promote_types(logits.dtype, torch.float32)
        scores = logits[None].to(self.device or logits.device, dtype, copy=bool(self.processors))
        if self.processors:
            ids: Any = torch.tensor([text], device=scores.device)
            scores = self.processors(ids, scores)  # type: ignore[arg-type]
        return scores[0]

    def noised(self, text: list[int], scores: torch.Tensor) -> torch.Tensor:
        """`scores` as they are when greedy, else their log-probabilities plus the noise of this position."""
        if self.seed is None:
            return scores
        noise = torch.from_numpy(gumbel(self.seed, len(text), scores.shape[-1])).to(scores.device)
        return torch.log_softmax(scores, dim=-1) + noise

    def scores(self, text: list[int], logits: torch.Tensor) -> torch.Tensor:
        """What is compared to choose the token after `text`, from the target's logits there, both of shape (V,)."""
        return self.noised(text, self.processed(text, logits))

    def choose(self, text: list[int], logits: torch.Tensor) -> int:
        """The token that follows `text`; raises ScoreError where there is none."""
        scores = self.processed(text, logits)
        token = self.checked(int(best(self.noised(text, scores)[None])), text, logits, scores)
        if self.record is not None:
            self.record.append((logits[None].to(scores.device, torch.float32, copy=True), scores[None].clone()))
        return token

    def checked(self, token: int, text: list[int], logits: torch.Tensor, scores: torch.Tensor) -> int:
        """`token`, which `best` chose after `text` by the target's logits and the processed scores, both (V,).

        Raises ScoreError where it is none, and says why.
        """
        if token >= 0:
            return token
        said = f"no token can be chosen after {len(text)} tokens of prompt and answer: the target's scores"
        dtype = str(logits.dtype).removeprefix("torch.")
        if fault := self._fault(logits):
            raise ScoreError(
                f"{said} {fault} in {dtype}; load it in another dtype (bfloat16 and float32 hold larger numbers than "
                "float16), or check its weights"
            )
        by = ", ".join(
            f"temperature {one.temperature}" if isinstance(one, TemperatureLogitsWarper) else type(one).__name__
            for one in self.processors
        )
        raise ScoreError(
            f"{said} are numbers in {dtype}, but {self._fault(scores)} after {by}; raise the temperature, or leave a "
            "token that may be chosen"
        )

    def _fault(self, scores: torch.Tensor) -> str:
        """What is wrong with scores, (V,); empty where a token can be chosen by them."""
        if scores.isnan().any():
            return "hold a NaN"
        if scores.max() == -torch.inf:
            return "are all -inf"
        return "hold an infinity" if self.seed is not None and scores.max() == torch.inf else ""

    @property
    def plain(self) -> bool:
        """Greedy without processors or record: an argmax over all rows at once serves."""
        return not self.processors and self.seed is None and self.record is None
