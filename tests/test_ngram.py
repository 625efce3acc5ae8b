"""The n-gram drafter proposes what followed the longest earlier matches of the last tokens (spec sections 1 and 2)."""

import json
import math
import random

import pytest

from treegraft.runtime.ngram import CALIBRATION_FILE, NGramDrafter
from treegraft.runtime.tree import Paths

TEXT = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 3, 8, 5, 1, 2]


def drafter(text: list[int]) -> tuple[NGramDrafter, Paths]:
    """A drafter that has read `text`, and the paths of a round whose root is the text's last token."""
    made = NGramDrafter()
    made.extend(text)
    return made, Paths(text[-1], text[:-1], made.longest)


def proposed(text: list[int], *path: int, count: int = 4) -> list[int]:
    small, paths = drafter(text)
    at = 0
    for token in path:
        at = paths.child(at, token)
    return [token for token, _ in small.propose(paths, at, count)]


def random_text(seed: int, length: int = 80, size: int = 5) -> list[int]:
    return random.Random(seed).choices(range(size), k=length)


def test_an_index_that_grows_is_the_one_built_at_once() -> None:
    for seed in range(10):
        text = random_text(seed)
        whole, paths = drafter(text)
        draw = random.Random(seed)
        grown = NGramDrafter()
        at = 0
        while at < len(text):
            step = draw.randint(1, 7)
            grown.extend(text[at : at + step])
            grown.propose(Paths(grown.committed[-1], grown.committed[:-1], grown.longest), 0, 3)
            at += step
        assert grown.committed == whole.committed == text
        for first in range(5):
            for second in range(5):
                path = paths.child(paths.child(0, first), second)
                assert grown.propose(paths, path, 4) == whole.propose(paths, path, 4)
                assert grown.match(paths, path) == whole.match(paths, path)


def test_matches_are_those_found_by_scanning_the_text() -> None:
    for seed in range(20):
        text = random_text(seed, size=4 + seed % 8)
        small, paths = drafter(text)
        for tokens in ((), (0,), (1, 2), (3, 3, 3), (99,), (99, 1)):
            path = 0
            for token in tokens:
                path = paths.child(path, token)
            tail = (text + list(tokens))[-small.longest :]
            expected = (0, 0)
            for length in range(len(tail), 0, -1):
                ends = [end for end in range(length, len(text)) if text[end - length : end] == tail[-length:]]
                if ends:
                    expected = (length, len(text) - ends[-1])
                    break
            assert small.match(paths, path) == expected


def test_followers_of_the_longest_match_come_first() -> None:
    # 5 1 2 and 5 1 have no earlier occurrence; 1 2 was followed by 3, 4 and 3.
    assert proposed(TEXT) == [3, 4]
    # 9 1 2 was followed by 4 and then by 3, once each: the later one first.
    assert proposed([*TEXT, 9, 1, 2]) == [3, 4, 9]
    # 2 3 was followed by 9 and 8; the shorter match 3 gives nothing else.
    assert proposed(TEXT, 3) == [8, 9]
    assert proposed([7, 1, 6, 1, 6, 1, 5, 8, 1]) == [6, 5]


def test_shorter_matches_fill_up_what_the_longest_leaves() -> None:
    text = [1, 2, 3, 7, 2, 5, 7, 2, 6, 1, 2]
    assert proposed(text) == [3, 6, 5]
    assert proposed(text, count=2) == [3, 6]
    assert proposed(text, count=1) == [3]


def test_match_length_and_recency_on_examples() -> None:
    small, paths = drafter(TEXT)
    assert small.match(paths, 0) == (2, 5)  # 1 2, last followed by the 3 that is five tokens back
    assert small.match(paths, paths.child(0, 3)) == (3, 4)  # 1 2 3, followed by 8
    assert small.match(paths, paths.child(0, 77)) == (0, 0)
    again, paths = drafter([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7])
    assert again.match(paths, 0) == (again.longest, 8)  # never longer than the index


@pytest.mark.parametrize("text", [[4], [4, 5], [4, 5, 6]], ids=str)
def test_a_text_without_repetition_has_no_match(text: list[int]) -> None:
    small, paths = drafter(text)
    assert small.propose(paths, 0, 4) == []
    assert small.match(paths, 0) == (0, 0)


def test_the_last_token_does_not_match_itself() -> None:
    assert proposed([4, 4]) == [4]  # the second 4 followed the first; nothing follows the second yet
    assert proposed([5, 4]) == []


def test_probabilities_lie_in_zero_to_one() -> None:
    for seed in range(20):
        text = random_text(seed, length=200, size=3 + seed)
        small, paths = drafter(text)
        path = 0
        for token in random_text(seed + 100, length=4, size=3 + seed):
            for proposal, log_p in small.propose(paths, path, 5):
                assert isinstance(proposal, int)
                assert math.isfinite(log_p) and 0 < math.exp(log_p) <= 1
            path = paths.child(path, token)


def test_calibration_decides_the_probabilities() -> None:
    weights = json.loads(CALIBRATION_FILE.read_text())
    assert len(weights["length"]) == NGramDrafter.longest
    even = {name: [0.0] * len(values) for name, values in weights.items()}
    small = NGramDrafter(even)
    small.extend(TEXT)
    paths = Paths(TEXT[-1], TEXT[:-1], small.longest)
    assert [log_p for _, log_p in small.propose(paths, 0, 4)] == pytest.approx([math.log(0.5)] * 2)
    even["share"] = [1.0]
    assert small.log_p((2, 0, 3, 4, 10)) == pytest.approx(-math.log1p(math.exp(-0.75)))


def test_a_longer_and_fresher_match_is_believed_more() -> None:
    small = NGramDrafter()
    assert small.log_p((6, 0, 3, 3, 20)) > small.log_p((1, 0, 3, 3, 20))
    assert small.log_p((3, 0, 3, 3, 20)) > small.log_p((3, 0, 1, 3, 20))
    assert small.log_p((3, 0, 2, 4, 20)) > small.log_p((3, 2, 2, 4, 20))


def test_no_calibration_is_too_sure_to_be_computed() -> None:
    weights = json.loads(CALIBRATION_FILE.read_text())
    for odds in (-2000.0, 2000.0):
        sure = NGramDrafter({**weights, "length": [odds] * NGramDrafter.longest})
        assert math.isfinite(sure.log_p((2, 0, 1, 1, 5))) and sure.log_p((2, 0, 1, 1, 5)) <= 0
