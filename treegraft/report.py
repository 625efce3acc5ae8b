"""Reports in one HTML file: speedup bars, time by part, where the medium drafter is called, a real round's tree."""

from html import escape
from typing import Any

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


def page(sections: list[tuple[str, str, str]], title: str = "TreeGraft demo") -> str:
    """The HTML page of (title, explanation, SVG or HTML) sections."""
    body = "".join(f"<h2>{escape(head)}</h2><p>{escape(text)}</p>{content}" for head, text, content in sections)
    return (
        f'<!doctype html><meta charset="utf-8"><title>{escape(title)}</title><style>'
        "body{font:15px system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}"
        "td,th{padding:.25em .8em;text-align:right}td:first-child{text-align:left}svg{max-width:100%;height:auto}"
        f"</style><h1>{escape(title)}</h1>{body}\n"
    )


def table(figures: dict[str, dict[str, Any]]) -> str:
    """The figures of each schedule as an HTML table."""
    rows = [
        [
            name, f"{m['tokens_per_second']:.2f}", f"{m['speedup']:.3f}", _range(m["speedup_interval"]),
            *((f"{m['accepted_per_round']:.2f}", f"{m['medium_calls_per_round']:.2f}") if m["rounds"] else ("", "")),
            texts(m),
        ]
        for name, m in figures.items()
    ]  # fmt: skip
    heads = ["schedule", "tokens/s", "speedup", "95 % interval", "accepted/round", "medium calls/round", "text"]
    return _table(heads, rows)


def texts(figures: dict[str, Any]) -> str:
    """How a schedule's texts compare with the target's own, such as "equal" or "2 different, 1 unconfirmed"."""
    counts = {"different": figures["texts_different"], "unconfirmed": figures["unconfirmed"], "tied": figures["ties"]}
    said = ["equal"] if figures["text_equal"] else []
    return ", ".join(said + [f"{count} {verdict}" for verdict, count in counts.items() if count])


def over(figures: dict[str, dict[str, Any]], other: str) -> str:
    """Each schedule's tokens per second over those of `other`, with the paired interval, as an HTML table."""
    rows = [
        [name, f"{m['over'][other]['gain']:.3f}", _range(m["over"][other]["interval"])]
        for name, m in figures.items()
        if other in m["over"]
    ]
    return _table(["schedule", f"over {other}", "95 % interval"], rows)


def split(figures: dict[str, dict[str, Any]]) -> str:
    """The share of the rounds' time that each schedule spent in each part, as an HTML table."""
    mine = {name: m["time_ms"] for name, m in figures.items() if m["rounds"]}
    heads = ["schedule", *next(iter(mine.values()), {})]
    return _table(heads, [[name, *(f"{ms / sum(t.values()):.1%}" for ms in t.values())] for name, t in mine.items()])


def _range(interval: list[float]) -> str:
    return f"{interval[0]:.3f} .. {interval[1]:.3f}"


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    return f"<table><tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>{''.join(lines)}</table>"


def svg(width: int, height: int, parts: list[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui,sans-serif" font-size="12">{"".join(parts)}</svg>'
    )
