"""What a student learns from: decision points with the value model's margins, and thresholds that are safe to ship."""

from dataclasses import dataclass

import numpy as np

from treegraft.value_system.replay import NAMES


@dataclass
class Examples:
    """Decision points: all signals `values` (n, len(NAMES)), `margin` (n,) in tokens, `weight` (n,) of the visits.

    `names` are the signals that a student may read. A wrong decision costs |margin|, so that is a decision's weight.
    """

    values: np.ndarray
    margin: np.ndarray
    weight: np.ndarray
    names: list[str]

    @property
    def x(self) -> np.ndarray:
        """The columns of `names`."""
        return self.values[:, [NAMES.index(name) for name in self.names]]

    @property
    def step(self) -> np.ndarray:
        return self.values[:, NAMES.index("step")]

    @property
    def cap(self) -> float:
        """The greatest |margin| that counts in the choice of splits: the 90th percentile of the positive margins.

        Most states are far below zero (a copied passage, say) and would drown the few worth a call, which are near it.
        What a leaf decides goes by the margins as they are.
        """
        positive = self.margin[self.margin > 0]
        return float(np.quantile(positive, 0.9)) if len(positive) else np.inf

    @property
    def pull(self) -> np.ndarray:
        """What each example weighs in the choice of splits by sign: its visits times |margin|, capped."""
        return self.weight * np.minimum(np.abs(self.margin), self.cap) + 1e-12


def midpoint(observed: np.ndarray, threshold: float) -> float:
    """The middle between the sorted observed values on either side of a threshold.

    The log holds float32 and a live run float64: far from every value, both fall on the same side.
    """
    at = int(np.searchsorted(observed, threshold, side="right"))
    if at in (0, len(observed)):
        return float(threshold)
    return (float(observed[at - 1]) + float(observed[at])) / 2
