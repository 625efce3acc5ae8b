"""The default small drafter: an n-gram matcher over prompt and answer, with calibrated probabilities."""

import json
import math
from functools import cache
from pathlib import Path

from treegraft.runtime.tree import Paths

CALIBRATION_FILE = Path(__file__).parent.parent / "data" / "ngram-calibration.json"


@cache
def default_calibration() -> dict[str, list[float]]:
    """The calibration that the package ships, made by tools/calibrate_ngram.py."""
    return json.loads(CALIBRATION_FILE.read_text())


class NGramDrafter:
    """Proposes what followed the longest earlier matches of the last tokens (spec sections 1 and 2).

    The index maps every n-gram of up to `longest` committed tokens to the tokens that followed it, each with its count
    and latest position; it grows as tokens are committed and is never rebuilt.
    `calibration` turns a proposal's features into the log-odds that the target continues with it.
    """

    longest = 6

    def __init__(self, calibration: dict[str, list[float]] | None = None):
        self.calibration = calibration or default_calibration()
        self.committed: list[int] = []
        self._following: dict[tuple[int, ...], dict[int, tuple[int, int]]] = {}
        self._proposals: dict[int, list[tuple[int, float]]] = {}
        self._matches: dict[int, tuple[int, int]] = {}

    def extend(self, tokens: list[int]) -> None:
        """Index newly committed tokens, the new root included, and start a round."""
        for token in tokens:
            position = len(self.committed)
            tail = tuple(self.committed[-self.longest :])
            for start in range(len(tail)):
                following = self._following.setdefault(tail[start:], {})
                following[token] = (following.get(token, (0, 0))[0] + 1, position)
            self.committed.append(token)
        self._proposals, self._matches = {}, {}

    def match(self, paths: Paths, path: int) -> tuple[int, int]:
        """Length of the longest match at a path's end, and the tokens since its latest occurrence (0, 0: no match)."""
        found = self._matches.get(path)
        if found is None:
            found = (0, 0)
            tail = paths.tails[path]
            for start in range(max(0, len(tail) - self.longest), len(tail)):
                if following := self._following.get(tail[start:]):
                    latest = max(position for _, position in following.values())
                    found = (len(tail) - start, len(self.committed) - latest)
                    break
            self._matches[path] = found
        return found

    def propose(self, paths: Paths, path: int, count: int) -> list[tuple[int, float]]:
        """The longest match's followers first, most frequent and then most recent first, then shorter matches'."""
        found = self._proposals.get(path)
        if found is None:
            found = [(token, self.log_p(features)) for token, features in self.candidates(paths, path, count)]
            self._proposals[path] = found
        return found[:count]

    def candidates(self, paths: Paths, path: int, count: int) -> list[tuple[int, tuple[int, int, int, int, int]]]:
        """Proposed tokens with (match length, rank, count, matches of this length, tokens since it last occurred)."""
        tail = paths.tails[path]
        found: dict[int, tuple[int, int, int, int, int]] = {}
        for start in range(max(0, len(tail) - self.longest), len(tail)):
            following = self._following.get(tail[start:])
            if not following:
                continue
            total = sum(times for times, _ in following.values())
            ordered = sorted(following.items(), key=lambda item: (-item[1][0], -item[1][1]))
            for token, (times, position) in ordered[: count + len(found)]:
                if token not in found:
                    found[token] = (len(tail) - start, len(found), times, total, len(self.committed) - position)
                if len(found) == count:
                    return list(found.items())
        return list(found.items())

    def log_p(self, features: tuple[int, int, int, int, int]) -> float:
        """The calibrated log-probability of a proposal."""
        length, rank, times, total, since = features
        weights = self.calibration
        odds = (
            weights["length"][length - 1]
            + weights["rank"][min(rank, len(weights["rank"]) - 1)]
            + weights["share"][0] * (times / total)
            + weights["count"][0] * math.log(times)
            + weights["recency"][0] * math.log(since)
        )
        return -math.log1p(math.exp(-odds)) if odds > 0 else odds - math.log1p(math.exp(odds))
