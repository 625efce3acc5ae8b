"""Pictures of reports, each page one HTML file: speedup bars, where the medium drafter is called, a round's tree."""

import math
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a page of figures alone needs neither
    from transformers import PreTrainedTokenizerBase

    from treegraft.runtime.tree import DraftTree

COLOURS = {"root": "#555", "small": "#1b9e77", "medium": "#d95f02"}


def bars(figures: dict[str, dict[str, Any]]) -> str:
    """Speedup over autoregressive of each schedule with its 95 % interval, as SVG."""
    rows = list(figures.items())
    scale = 380 / max(m["speedup_interval"][1] for _, m in rows)
    parts = []
    for i, (name, m) in enumerate(rows):
        y, width = 10 + 34 * i, m["speedup"] * scale
        low, high = (170 + edge * scale for edge in m["speedup_interval"])
        parts.append(
            f'<text x="160" y="{y + 16}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="170" y="{y}" width="{width:.1f}" height="24" fill="#7570b3" opacity="0.75"/>'
            f'<path d="M{low:.1f} {y + 12}H{high:.1f}M{low:.1f} {y + 6}v12M{high:.1f} {y + 6}v12" stroke="#222"/>'
            f'<text x="{max(high, 170 + width) + 8:.1f}" y="{y + 16}">{m["speedup"]:.2f}</text>'
        )
    one = 170 + scale
    parts.append(f'<path d="M{one:.1f} 4V{10 + 34 * len(rows)}" stroke="#999" stroke-dasharray="3 3"/>')
    return svg(620, 20 + 34 * len(rows), parts)


def calls(shares: dict[str, list[float]]) -> str:
    """A grid: the share of rounds that call the medium drafter at each step, a row a file, as SVG."""
    parts = []
    for i, (file, row) in enumerate(shares.items()):
        y = 30 + 30 * i
        parts.append(f'<text x="120" y="{y + 19}" text-anchor="end">{escape(file)}</text>')
        for k, share in enumerate(row):
            x = 130 + 70 * k
            parts.append(
                f'<rect x="{x}" y="{y}" width="68" height="28" fill="{COLOURS["medium"]}" fill-opacity="{share:.2f}" '
                f'stroke="#ccc"/><text x="{x + 34}" y="{y + 19}" text-anchor="middle">{share:.0%}</text>'
            )
    steps = max(map(len, shares.values()), default=0)
    parts += [f'<text x="{164 + 70 * k}" y="20" text-anchor="middle">step {k + 1}</text>' for k in range(steps)]
    return svg(150 + 70 * steps, 40 + 30 * len(shares), parts)


def draw_tree(tree: "DraftTree", kept: list[int], accepted: list[int], tokenizer: "PreTrainedTokenizerBase") -> str:
    """A round's draft tree as SVG: who proposed each node, its s, what was verified and what was accepted."""
    height: dict[int, float] = {}
    leaves = 0

    def place(node: int) -> None:
        nonlocal leaves
        children = tree.top(list(tree.children[node]), len(tree))
        for child in children:
            place(child)
        if children:
            height[node] = (height[children[0]] + height[children[-1]]) / 2
        else:
            height[node] = leaves
            leaves += 1

    place(0)
    verified, path = {0, *kept}, {0, *accepted}
    parts = []
    for node in range(len(tree)):
        x, y = 20 + 150 * tree.depth[node], 24 + 26 * height[node]
        on_path, colour = node in path, COLOURS[tree.proposers[node]]
        if node:
            px, py = x - 150 + 104, 24 + 26 * height[tree.parent[node]]
            stroke = 'stroke="#222" stroke-width="2.5"' if on_path else 'stroke="#bbb"'
            curve = f"M{px:.0f} {py:.0f}C{px + 24:.0f} {py:.0f} {x - 24} {y:.0f} {x} {y:.0f}"
            parts.append(f'<path d="{curve}" fill="none" {stroke}/>')
        label = escape(repr(tokenizer.decode([tree.token[node]]))[1:-1][:12])
        parts.append(
            f'<g opacity="{1 if node in verified else 0.35}">'
            f'<rect x="{x}" y="{y - 11:.0f}" width="104" height="22" rx="5" fill="{colour}" '
            f'fill-opacity="{0.45 if on_path else 0.12}" stroke="{colour}"/>'
            f'<text x="{x + 6}" y="{y + 4:.0f}" xml:space="preserve">{label}</text>'
            f'<text x="{x + 99}" y="{y + 4:.0f}" text-anchor="end" fill="#777" font-size="9">'
            f"{math.exp(tree.log_s[node]):.2f}</text></g>"
        )
    return svg(150 * (max(tree.depth) + 1), 20 + 26 * max(leaves, 1), parts)


def page(sections: list[tuple[str, str, str]], title: str = "TreeGraft demo") -> str:
    """The HTML page called `title` of (title, explanation, SVG or HTML) sections."""
    body = "".join(f"<h2>{escape(title)}</h2><p>{escape(text)}</p>{content}" for title, text, content in sections)
    return (
        f'<!doctype html><meta charset="utf-8"><title>{escape(title)}</title><style>'
        "body{font:15px system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}"
        "td,th{padding:.25em .8em;text-align:right}td:first-child{text-align:left}svg{max-width:100%;height:auto}"
        f"</style><h1>{escape(title)}</h1>{body}\n"
    )


def table(figures: dict[str, dict[str, Any]]) -> str:
    """The figures of each schedule as an HTML table."""
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{m['tokens_per_second']:.2f}</td><td>{m['speedup']:.3f}</td>"
        f"<td>{m['speedup_interval'][0]:.3f} .. {m['speedup_interval'][1]:.3f}</td>"
        f"<td>{m['accepted_per_round']:.2f}</td><td>{m['medium_calls_per_round']:.2f}</td>"
        f"<td>{'equal' if m['text_equal'] else 'differs'}</td></tr>"
        for name, m in figures.items()
    )
    heads = ("schedule", "tokens/s", "speedup", "95 % interval", "accepted/round", "medium calls/round", "text")
    return f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{rows}</table>"


def svg(width: int, height: int, parts: list[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui,sans-serif" font-size="12">{"".join(parts)}</svg>'
    )
