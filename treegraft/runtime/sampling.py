"""How the target chooses a token: greedily, or with noise that depends on seed and text position alone.

Since the choice at a position does not depend on the tree, every schedule emits the same text (spec section 3).
"""

from dataclasses import dataclass, field
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


@dataclass
class Chooser:
    """Chooses the target's next token after logits processors; `seed` None is greedy."""

    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    seed: int | None = None

    @classmethod
    def make(
        cls,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
    ) -> "Chooser":
        """As `generate` orders them: repetition penalty, temperature, top-k, top-p. Temperature 0 is greedy."""
        processors = LogitsProcessorList()
        if repetition_penalty != 1.0:
            processors.append(RepetitionPenaltyLogitsProcessor(repetition_penalty))
        if temperature <= 0:
            return cls(processors)
        if temperature != 1.0:
            processors.append(TemperatureLogitsWarper(temperature))
        if top_k:
            processors.append(TopKLogitsWarper(top_k))
        if top_p < 1.0:
            processors.append(TopPLogitsWarper(top_p))
        return cls(processors, seed)

    def scores(self, text: list[int], logits: torch.Tensor) -> torch.Tensor:
        """What is compared to choose the token after `text`, from the target's logits there, both of shape (V,)."""
        scores = logits[None] if logits.dtype == torch.float64 else logits[None].float()
        if self.processors:
            ids: Any = torch.tensor([text], device=logits.device)
            scores = self.processors(ids, scores)  # type: ignore[arg-type]
        if self.seed is not None:
            noise = torch.from_numpy(gumbel(self.seed, len(text), logits.shape[-1])).to(logits.device)
            scores = torch.log_softmax(scores, dim=-1) + noise
        return scores[0]

    def choose(self, text: list[int], logits: torch.Tensor) -> int:
        """The token that follows `text`."""
        return int(self.scores(text, logits).argmax())

    @property
    def plain(self) -> bool:
        """Greedy without processors: an argmax over all rows at once serves."""
        return not self.processors and self.seed is None
