"""Draw the concept pages' pictures into docs/pictures: `python tools/draw_concepts.py`.

The trees are grown by the decoder's own steps, with two drafters that read their probabilities off a table.
"""

import math
from pathlib import Path

from treegraft.draw import BOX, COLUMN, ROW, DrawnRound, Step, heights, picture, tree_parts
from treegraft.report import COLOURS
from treegraft.runtime.drafting import Drafting, medium_step, plan_medium, small_step
from treegraft.runtime.tree import DraftTree, Paths

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
DRAFTING = Drafting(depth=3, width=2, children=2, budget=24)
SMALL = {"cat": {"sat": 0.62, "ran": 0.2}, "sat": {"on": 0.8, "down": 0.1}, "ran": {"off": 0.5, "away": 0.3}}
MEDIUM = {
    "cat": {"slept": 0.45, "sat": 0.3, "ran": 0.05},
    "sat": {"on": 0.6, "down": 0.2},
    "ran": {"away": 0.5, "off": 0.1},
}
WORDS = ["cat", "sat", "ran", "on", "down", "off", "away", "slept"]


class TableDrafter:
    """Either drafter, from a table of next words."""

    def __init__(self, table: dict[str, dict[str, float]]):
        self.table = table

    def propose(self, paths: Paths, path: int, count: int) -> list[tuple[int, float]]:
        return self._best(WORDS[paths.tokens[path]], count)

    def _best(self, word: str, count: int) -> list[tuple[int, float]]:
        best = sorted(self.table.get(word, {}).items(), key=lambda entry: -entry[1])[:count]
        return [(WORDS.index(word), math.log(p)) for word, p in best]


class TableMedium(TableDrafter):
    """The medium drafter looks paths up by their last word too."""

    def __init__(self, table: dict[str, dict[str, float]], paths: Paths):
        super().__init__(table)
        self.paths = paths

    def top(self, path: int, count: int) -> list[tuple[int, float]]:
        return self.propose(self.paths, path, count)

    def log_p(self, path: int, tokens: list[int]) -> list[float | None]:
        known = self.table.get(WORDS[self.paths.tokens[path]], {})
        return [math.log(known[WORDS[token]]) if WORDS[token] in known else None for token in tokens]


def graft() -> str:
    """Two small steps, then a medium step: before and after, each with the frontier that is chosen there."""
    paths = Paths(0, [], 6)
    tree, medium = DraftTree(token=[0]), TableMedium(MEDIUM, paths)
    ends = [1]
    for _ in range(2):
        small_step(tree, paths, TableDrafter(SMALL), None, DRAFTING)
        ends.append(len(tree))
    before = tree.fork()
    frontier = medium_step(tree, paths, plan_medium(tree, DRAFTING), medium, DRAFTING)
    ends.append(len(tree))

    parts = [_title(24, "After two small steps. A third would expand the newest nodes, best s first:")]
    drawn, y = _panel(before, ends, before.top(before.new, DRAFTING.width), COLOURS["small"], 56)
    parts += [*drawn, _title(y + 22, "Instead the medium drafter: it rescores, goes back for the best s, and grafts.")]
    drawn, y = _panel(tree, ends, frontier, COLOURS["medium"], y + 54)
    return picture(640, y + 4, parts + drawn)


def _panel(tree: DraftTree, ends: list[int], frontier: list[int], colour: str, top: float) -> tuple[list[str], float]:
    """A tree with rings around its frontier, and where it ends."""
    names = ("small", "small", "medium")
    steps = [Step(name, "", range(low, high), 0) for name, low, high in zip(names, ends, ends[1:])]
    words = [WORDS[token] for token in tree.token]
    drawn = DrawnRound(1, tree, list(range(1, len(tree))), [], steps, words, "", None)
    parts, bottom = tree_parts(drawn, top)
    lines = heights(tree)
    rings = [
        f'<rect x="{20 + COLUMN * tree.depth[node] - 12}" y="{top + ROW * lines[node] - 14:.0f}" width="{BOX + 17}" '
        f'height="28" rx="9" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="5 3"/>'
        for node in frontier
    ]
    return parts + rings, round(bottom)


def fork(steps: int = 3) -> str:
    """The decisions of one position: every schedule is a leaf, every step is one medium forward."""
    parts, top, row, column = [], 62, 34, 150
    for k in range(steps + 1):
        x, size = 40 + column * k, 1 << steps - k
        if k < steps:
            parts.append(
                f'<rect x="{x + 24}" y="44" width="{column - 48}" height="{row * (1 << steps) + 8}" rx="10" '
                f'fill="{COLOURS["medium"]}" fill-opacity="0.07"/>'
                f'<text x="{x + column / 2}" y="34" text-anchor="middle" fill="#555">'
                f"step {k + 1}: one forward</text>"
            )
        for i in range(1 << k):
            y = top + row * (size * i + (size - 1) / 2)
            for half in range(2 if k < steps else 0):  # upper: skip, lower: call
                to = top + row * (size / 2 * (2 * i + half) + (size / 2 - 1) / 2)
                colour = COLOURS["medium" if half else "small"]
                parts.append(f'<path d="M{x} {y}L{x + column} {to}" stroke="{colour}" stroke-width="2.5"/>')
            parts.append(f'<circle cx="{x}" cy="{y}" r="6" fill="#fff" stroke="#555" stroke-width="2"/>')
            if k == steps:
                mask = sum((i >> steps - 1 - bit & 1) << bit for bit in range(steps))
                parts.append(f'<text x="{x + 16}" y="{y + 4}" font-family="monospace">{mask:#0{steps + 2}b}</text>')
    y = top + row * (1 << steps) + 18
    parts += [
        f'<path d="M40 {y}h26" stroke="{COLOURS["small"]}" stroke-width="2.5"/><text x="74" y="{y + 4}">skip</text>',
        f'<path d="M130 {y}h26" stroke="{COLOURS["medium"]}" stroke-width="2.5"/><text x="164" y="{y + 4}">call</text>',
        f'<text x="230" y="{y + 4}" fill="#555">{1 << steps} schedules, {steps} medium forwards</text>',
    ]
    return picture(640, y + 20, parts)


def value() -> str:
    """Worth of two continuations: expected tokens above what the time they take would earn anyway."""
    rho, skip, call = 0.022, (64, 1.75), (76, 2.3)  # tokens per ms; (ms, tokens)

    def x(ms: float) -> float:
        return 60 + ms * 5

    def y(tokens: float) -> float:
        return 300 - tokens * 100

    parts = [
        f'<path d="M{x(0)} {y(2.7)}V{y(0)}H{x(105)}" fill="none" stroke="#555"/>',
        f'<text x="{x(105)}" y="{y(0) + 30}" text-anchor="end" fill="#555">time of the round, ms</text>',
        f'<text x="{x(0) - 4}" y="{y(2.8)}" fill="#555">expected tokens</text>',
        f'<path d="M{x(0)} {y(0)}L{x(105)} {y(rho * 105)}" stroke="#555" stroke-dasharray="5 4"/>',
        f'<text x="{x(84)}" y="{y(rho * 84) + 40}" fill="#555">ρ: what time earns</text>',
        f'<text x="{x(84)}" y="{y(rho * 84) + 56}" fill="#555">on average</text>',
    ]
    for ms in (20, 40, 60, 80, 100):
        parts.append(f'<text x="{x(ms)}" y="{y(0) + 16}" text-anchor="middle" fill="#777">{ms}</text>')
    for tokens in (1, 2):
        parts.append(f'<text x="{x(0) - 10}" y="{y(tokens) + 4}" text-anchor="end" fill="#777">{tokens}</text>')
    for name, colour, (ms, tokens), side in (
        ("skip", COLOURS["small"], skip, -1),
        ("call", COLOURS["medium"], call, 1),
    ):
        above = tokens - rho * ms
        parts.append(
            f'<path d="M{x(ms)} {y(rho * ms)}V{y(tokens)}" stroke="{colour}" stroke-width="4"/>'
            f'<circle cx="{x(ms)}" cy="{y(tokens)}" r="7" fill="{colour}"/>'
            f'<text x="{x(ms) + 14 * side}" y="{y(tokens) - 8}" text-anchor="{"end" if side < 0 else "start"}" '
            f'fill="{colour}" font-weight="600">{name}: {above:+.2f} tokens</text>'
        )
    margin = (call[1] - rho * call[0]) - (skip[1] - rho * skip[0])
    parts.append(f'<text x="{x(52)}" y="{y(0.25)}" font-weight="600">margin of the call: {margin:+.2f} tokens</text>')
    return picture(640, 345, parts)


def _title(y: float, text: str) -> str:
    return f'<text x="20" y="{y}" font-weight="600">{text}</text>'


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for draw in (graft, fork, value):
        (PICTURES / f"{draw.__name__}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
