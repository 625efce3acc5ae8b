"""report.html of a value folder: what a schedule gains and leaves, which signals tell, and whether they are right."""

import json
from html import escape
from pathlib import Path
from typing import Any

from treegraft.report import bars, calls, page, svg
from treegraft.runtime.signals import RELEASE, SIGNALS

PURPLE, GREEN, ORANGE = "#7570b3", "#1b9e77", "#d95f02"


def write_report(folder: Path) -> None:
    """Draw value.json and metrics.json of a value folder into its report.html, one self-contained file."""
    value, metrics = (json.loads((folder / name).read_text()) for name in ("value.json", "metrics.json"))
    policies = {name.replace(" over", ":"): m for name, m in value["cross_validated"].items() if "speedup" in m}
    most = max(policies.values(), key=lambda m: m["speedup"])["speedup"]
    best, learned = policies["best mask"]["speedup"], policies["value model"]["speedup"]
    sections = [
        (
            "Policies and the oracle",
            "Speed over autoregressive decoding on held-out prompts, all benchmarks together; lines are 95 % intervals "
            f"over prompts. The value model captures {_share(learned - best, most - best)} of what the oracle, which "
            "knows the text, has over the best fixed mask.",
            bars(policies),
        ),
        (
            f"What the {metrics['schedule']} gains, by benchmark",
            "Cross-validated by prompt. Each benchmark's better endpoint is the faster of small and medium in "
            "hindsight; the best fixed mask is one for all benchmarks. Overall is the mean of the benchmarks'.",
            gain_chart(metrics) + gain_table(metrics),
        ),
        (
            "What each signal is worth, by step",
            _on_signals(value),
            signal_grid(value["importance"], value["signals"]),
        ),
        (
            "How many signals are needed",
            "Held-out tokens per second of models with ever fewer signals, relative to the best. The smallest set "
            "within one standard error of the best is taken.",
            selection_chart(value["selection"], len(value["signals"]) - _context(value)),
        ),
        (
            "Is the predicted margin right?",
            "Predicted against realised margin of held-out decisions, in tokens, by decile of the prediction. On the "
            "diagonal they agree; above zero the model calls.",
            calibration_chart([(d["predicted"], d["realised"]) for d in value["calibration"]], PURPLE),
        ),
        (
            "Where the value model calls the medium drafter",
            "Share of held-out rounds with a medium step, by step.",
            calls(value["calls"]),
        ),
        (
            "Is s right?",
            "A node's s against how often the target accepts it, by decile of s, in the trees that each drafter builds "
            "alone (green: small, orange: medium). The verification size rests on it.",
            "".join(
                calibration_chart([(d["s"], d["accepted"]) for d in value["score_calibration"][name]], colour)
                for name, colour in (("small", GREEN), ("medium", ORANGE))
            ),
        ),
        (
            "How many nodes are verified",
            f"Of held-out rounds, as the value model and the cut have it, out of B = {value['drafting']['budget']}. "
            "Where many rounds reach B, a log with a greater B may show more gain.",
            size_table(value["verified"]),
        ),
    ]  # fmt: skip
    (folder / "report.html").write_text(page(sections, "What a call of the medium drafter is worth"))


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole > 1e-9 else "nothing"


def _context(value: dict[str, Any]) -> int:
    """How many of the model's signals are context that every model reads."""
    return len(value["signals"]) - len(set(value["signals"]) - {"step", "mask", "medium_calls"})


def _on_signals(value: dict[str, Any]) -> str:
    among = [name for name in RELEASE if name in value["signals"]]
    total = {name: sum(steps) for name, steps in value["importance"].items()}
    share = sum(total[name] for name in RELEASE) / (sum(total.values()) or 1)
    release = value["release"]
    low, high = release["interval"]
    return (
        "Share of the reduction in error that the model with all signals owes to each, by step, and its time on the "
        "decoding path. Filled names were selected; stars mark the six of the paper's release. Of these, "
        f"{len(among)} of 6 were selected ({', '.join(among) or 'none'}); they make {share:.0%} of the whole. A model "
        f"of the six alone decodes {release['gain']:.3f} times as fast (95 % interval {low:.3f} .. {high:.3f}) as the "
        "selected one."
    )


def gain_chart(metrics: dict[str, Any]) -> str:
    """Gain over the better endpoint and over the best fixed mask, a pair of bars a benchmark, with intervals."""
    rows = [*metrics["by_file"].items(), ("overall", metrics["overall"])]
    names = (("gain_over_better_endpoint", PURPLE), ("gain_over_best_fixed", GREEN))
    edges = [edge for _, row in rows for name, _ in names for edge in (*row[name]["interval"], row[name]["value"])]
    low, high = min(0.0, *edges), max(0.01, *edges)
    scale, zero = 400 / (high - low), 130 - low * 400 / (high - low)
    parts = [f'<path d="M{zero:.1f} 24V{36 + 40 * len(rows)}" stroke="#999"/>']
    for i, (name, colour) in enumerate(names):
        parts.append(f'<rect x="{130 + 210 * i}" y="4" width="10" height="10" fill="{colour}"/>'
                     f'<text x="{146 + 210 * i}" y="13">{escape(name.replace("_", " "))}</text>')  # fmt: skip
    for i, (file, row) in enumerate(rows):
        y = 30 + 40 * i
        parts.append(f'<text x="120" y="{y + 20}" text-anchor="end">{escape(file)}</text>')
        for j, (name, colour) in enumerate(names):
            value, (left, right) = row[name]["value"], (zero + edge * scale for edge in row[name]["interval"])
            x, width, middle = zero + min(0.0, value) * scale, abs(value) * scale, y + 8 + 15 * j
            parts.append(
                f'<rect x="{x:.1f}" y="{y + 2 + 15 * j}" width="{width:.1f}" height="13" fill="{colour}" '
                f'opacity="0.75"/><path d="M{left:.1f} {middle}H{right:.1f}" stroke="#222"/>'
                f'<text x="{max(right, zero) + 6:.1f}" y="{middle + 5}">{value:+.1%}</text>'
            )
    return svg(620, 40 + 40 * len(rows), parts)


def gain_table(metrics: dict[str, Any]) -> str:
    """All measures with their intervals as an HTML table."""
    measures = list(metrics["overall"])
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in ("benchmark", *measures))
    body = ""
    for file, row in (*metrics["by_file"].items(), ("overall", metrics["overall"])):
        cells = "".join(
            f"<td>{row[name]['value']:+.1%} ({row[name]['interval'][0]:+.1%} .. {row[name]['interval'][1]:+.1%})</td>"
            for name in measures
        )
        body += f"<tr><td>{escape(file)}</td>{cells}</tr>"
    return f"<table><tr>{head}</tr>{body}</table>"


def size_table(verified: dict[str, dict[str, float]]) -> str:
    """Nodes verified a round by benchmark as an HTML table."""
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{row['mean']:.1f}</td><td>{row['median']:.0f}</td>"
        f"<td>{row['at_budget']:.0%}</td></tr>"
        for name, row in verified.items()
    )
    return f"<table><tr><th>benchmark</th><th>mean</th><th>median</th><th>rounds at B</th></tr>{rows}</table>"


def signal_grid(importance: dict[str, list[float]], chosen: list[str]) -> str:
    """A row a signal, most important first: its share at each step, its cost, whether it was selected."""
    rows = sorted(importance.items(), key=lambda row: -sum(row[1]))
    steps = len(rows[0][1])
    parts = [f'<text x="{264 + 70 * k}" y="16" text-anchor="middle">step {k + 1}</text>' for k in range(steps)]
    parts.append(f'<text x="{290 + 70 * steps}" y="16" text-anchor="end">cost, µs</text>')
    for i, (name, shares) in enumerate(rows):
        y = 24 + 22 * i
        taken = name in chosen
        label = escape(name) + (" ★" if name in RELEASE else "")
        parts.append(
            f'<rect x="4" y="{y}" width="218" height="20" rx="4" fill="{PURPLE}" opacity="{0.3 if taken else 0}"/>'
            f'<text x="216" y="{y + 14}" text-anchor="end">{label}</text>'
        )
        for k, share in enumerate(shares):
            parts.append(
                f'<rect x="{230 + 70 * k}" y="{y}" width="68" height="20" fill="{ORANGE}" fill-opacity="{share:.2f}" '
                f'stroke="#ddd"/><text x="{264 + 70 * k}" y="{y + 14}" text-anchor="middle">{share:.0%}</text>'
            )
        parts.append(f'<text x="{290 + 70 * steps}" y="{y + 14}" text-anchor="end">{SIGNALS[name].cost_us:g}</text>')
    return svg(310 + 70 * steps, 30 + 22 * len(rows), parts)


def selection_chart(selection: list[dict[str, float]], size: int) -> str:
    """Held-out speed relative to the best by number of signals, with standard errors; the one taken is filled."""
    low = min(row["of_best"] - row["standard_error"] for row in selection)
    high = max(1.0, *(row["of_best"] + row["standard_error"] for row in selection))
    scale = 160 / (high - low or 1)
    parts = [f'<path d="M50 {20 + (high - 1) * scale:.1f}H{80 + 60 * len(selection)}" stroke="#999"/>']
    for i, row in enumerate(selection):
        x, y, error = 80 + 60 * i, 20 + (high - row["of_best"]) * scale, row["standard_error"] * scale
        parts.append(
            f'<path d="M{x} {y - error:.1f}V{y + error:.1f}" stroke="#222"/><circle cx="{x}" cy="{y:.1f}" r="5" '
            f'fill="{PURPLE if row["signals"] == size else "white"}" stroke="{PURPLE}"/>'
            f'<text x="{x}" y="204" text-anchor="middle">{row["signals"]}</text>'
            f'<text x="{x + 8}" y="{y + 4:.1f}" font-size="10">{row["of_best"]:.3f}</text>'
        )
    return svg(110 + 60 * len(selection), 214, parts)


def calibration_chart(pairs: list[tuple[float, float]], colour: str) -> str:
    """Realised against predicted, one point a decile, with the diagonal."""
    edges = [edge for pair in pairs for edge in pair] or [0.0]
    low, high = min(0.0, *edges), max(0.0, *edges)
    scale = 240 / (high - low or 1)

    def at(predicted: float, realised: float) -> tuple[float, float]:
        return 60 + (predicted - low) * scale, 260 - (realised - low) * scale

    (x0, y0), (x1, y1), (zx, zy) = at(low, low), at(high, high), at(0, 0)
    parts = [
        f'<path d="M{x0} {y0}L{x1} {y1}" stroke="#999" stroke-dasharray="4 3"/>'
        f'<path d="M60 {zy:.1f}H300M{zx:.1f} 20V260" stroke="#ccc"/>'
        f'<text x="54" y="{y0:.1f}" text-anchor="end">{low:.2f}</text>'
        f'<text x="54" y="{y1 + 4:.1f}" text-anchor="end">{high:.2f}</text>'
        f'<text x="{x0}" y="276" text-anchor="middle">{low:.2f}</text>'
        f'<text x="{x1}" y="276" text-anchor="middle">{high:.2f}</text>'
        '<text x="180" y="292" text-anchor="middle">predicted</text><text x="14" y="140">realised</text>'
    ]
    for pair in pairs:
        x, y = at(*pair)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}" opacity="0.8"/>')
    return svg(340, 300, parts)
