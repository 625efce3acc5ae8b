"""How many drafted nodes to verify (spec section 2): `worth`, `none`, or a fixed limit on log s."""

from dataclasses import dataclass

import numpy as np

from treegraft.runtime.latency import LatencyProfile


@dataclass(frozen=True)
class Cut:
    """The choice of verification size.

    kind "worth": the n that maximises (sum of the n best s) - rho * T_tgt(n + 1 tokens, context), rho in tokens per ms;
    "none": all nodes of the budget; "score": the nodes with log s >= `log_s`.
    """

    kind: str
    rho: float = 0.0
    profile: LatencyProfile | None = None
    log_s: float = 0.0

    def sizes(self, log_s: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Nodes to verify for trees whose ordered log s are the rows of `log_s` (float32, (trees, B), -inf: no node).

        `context` (trees,) are the tokens before each root. Ties go to the smallest size.
        """
        present = log_s > -np.inf
        if self.kind == "none":
            return present.sum(axis=1)
        if self.kind == "score":
            return (log_s >= self.log_s).sum(axis=1)
        assert self.profile is not None
        count = np.arange(log_s.shape[1] + 1)
        gains = np.exp(log_s.astype(np.float64)).cumsum(axis=1)
        gains = np.concatenate([np.zeros((len(log_s), 1)), gains], axis=1)
        worth = gains - self.rho * self.profile.target(count[None, :] + 1, context[:, None])
        worth[:, 1:][~present] = -np.inf
        return worth.argmax(axis=1)

    def size(self, log_s: list[float], context: int) -> int:
        """Nodes to verify for one tree."""
        row = np.array([log_s], dtype=np.float32)
        return int(self.sizes(row, np.array([context]))[0]) if log_s else 0
