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
        seed: int = 0,
    ) -> "Chooser":
        """As `generate` orders them: repetition penalty, temperature, top-k, top-p. Temperature 0 is greedy."""
        if temperature < 0:
            raise ValueError(f"temperature is {temperature}; it must be at least 0, which is greedy")
        if not 0 <= top_p <= 1:
            raise ValueError(f"top_p is {top_p}; it must be from 0 to 1, which is off")
        processors = LogitsProcessorList()
        if repetition_penalty != 1.0:
            processors.append(RepetitionPenaltyLogitsProcessor(repetition_penalty))
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
        """The token that follows `text`."""
        scores = self.processed(text, logits)
        if self.record is not None:
            self.record.append((logits[None].to(scores.device, torch.float32, copy=True), scores[None].clone()))
        return int(self.noised(text, scores).argmax())

    @property
    def plain(self) -> bool:
        """Greedy without processors or record: an argmax over all rows at once serves."""
        return not self.processors and self.seed is None and self.record is None
