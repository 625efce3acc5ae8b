"""`treegraft draw`: one real round as a picture and in the terminal, with the reason for every step's drafter."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from textwrap import wrap

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from treegraft.report import COLOURS
from treegraft.runtime.decode import Plan, Round, decode
from treegraft.runtime.models import Model
from treegraft.runtime.scheduler import Artifact, Mask, Rule, Rules
from treegraft.runtime.tree import DraftTree

STYLES = {"root": "bold", "small": "green", "medium": "dark_orange"}
COLUMN, ROW, BOX = 158, 27, 116  # of the picture, in px: a level of the tree, a line of nodes, a node's width


@dataclass
class Step:
    """One drafting step: its drafter and why, the nodes it attached, and those that the medium drafter processed."""

    drafter: str
    why: str
    attached: range
    processed: int


@dataclass
class DrawnRound:
    """A round as it was decoded. `words[node]` is the node's token as text, `before` the text up to the root."""

    number: int  # from 1
    tree: DraftTree
    kept: list[int]
    accepted: list[int]
    steps: list[Step]
    words: list[str]
    before: str
    bonus: str | None  # None where the answer ended before it

    def step_of(self, node: int) -> int:
        """The step, from 1, that attached a node; 0 for the root."""
        return next((k for k, step in enumerate(self.steps, start=1) if node in step.attached), 0)


def watch(target: Model, medium: Model | None, plan: Plan, prompt: list[int], max_new_tokens: int) -> list[DrawnRound]:
    """Decode an answer and keep every round for drawing.

    Raises ValueError for a plan that drafts nothing; see `decode` for other errors.
    """
    if not plan.drafting.depth:
        raise ValueError(f"schedule {plan.name!r} drafts no tree, so there is nothing to draw")
    seen: list[tuple[DraftTree, list[int], list[int]]] = []
    decoded = decode(target, medium, prompt, plan, max_new_tokens, on_tree=lambda *round_: seen.append(round_))
    tokenizer = target.tokenizer

    def word(token: int) -> str:
        return repr(tokenizer.decode([token]))[1:-1]

    drawn = []
    for number, (done, (tree, kept, accepted)) in enumerate(zip(decoded.rounds, seen), start=1):
        after = done.position + done.accepted + 1
        before = tokenizer.decode(prompt + decoded.tokens[: done.position], skip_special_tokens=True)
        drawn.append(
            DrawnRound(
                number, tree, kept, accepted[: done.accepted], _steps(plan, done, len(tree)),
                [word(token) for token in tree.token], " ".join(str(before).split()),
                word(decoded.tokens[after]) if after < len(decoded.tokens) else None,
            )
        )  # fmt: skip
    return drawn


def most_telling(rounds: list[DrawnRound]) -> DrawnRound:
    """The round with most accepted tokens, among those where both drafters proposed, if any did."""
    return max(rounds, key=lambda drawn: ({"small", "medium"} <= set(drawn.tree.proposers), len(drawn.accepted)))


def _steps(plan: Plan, done: Round, nodes: int) -> list[Step]:
    starts = [*done.starts, nodes]
    return [
        Step(
            "medium" if done.mask >> k & 1 else "small",
            why(plan, k + 1, done.mask & ((1 << k) - 1), done.signals[k]),
            range(starts[k], starts[k + 1]),
            done.tokens[k],
        )
        for k in range(len(done.tokens))
    ]


def why(plan: Plan, step: int, mask: int, signals: dict[str, float]) -> str:
    """In words, why a step's drafter was chosen: the mask, the rule that fired (or what was missing), or the margin."""
    schedule = plan.schedule.schedule if isinstance(plan.schedule, Artifact) else plan.schedule
    if not plan.drafting.may_call(mask):
        return "no medium call left in this round"
    if isinstance(schedule, Mask):
        return "fixed by the schedule"
    if not all(map(math.isfinite, signals.values())):
        return "a signal was not finite: fallback schedule"
    if isinstance(schedule, Rules):
        return _which_rule([rule for rule in schedule.rules if rule.step == step], signals)
    tightest: dict[tuple[str, str], float] = {}
    node = 0
    while schedule.feature[node] >= 0:
        name, threshold = schedule.reads[schedule.feature[node]], schedule.threshold[node]
        low = signals[name] <= threshold
        tightest[name, "<=" if low else ">"] = threshold  # going down, the last bound is the tightest
        node = schedule.left[node] if low else schedule.right[node]
    path = [(name, operator, threshold) for (name, operator), threshold in tightest.items()]
    return f"margin {schedule.value[node]:+.3f} tokens" + (f": {_conditions(path, signals)}" if path else "")


def _which_rule(rules: list[Rule], signals: dict[str, float]) -> str:
    if not rules:
        return "no rule for this step"
    for rule in rules:
        if rule.holds(signals):
            return f"rule: {_conditions(rule.conditions, signals) or 'always'}"
    failed = [
        next(
            f"{name} {signals[name]:.4g}, not {operator} {threshold:.4g}"
            for name, operator, threshold in rule.conditions
            if not Rule(rule.step, ((name, operator, threshold),)).holds(signals)
        )
        for rule in rules
    ]
    return "no rule holds: " + "; ".join(failed)


def _conditions(conditions: Iterable[tuple[str, str, float]], signals: dict[str, float]) -> str:
    return ", ".join(f"{name} {signals[name]:.4g} {op} {threshold:.4g}" for name, op, threshold in conditions)


def in_terminal(drawn: DrawnRound) -> RenderableType:
    """The round for rich: the verified nodes as a tree, the steps as a table, and what came out."""
    tree, kept = drawn.tree, set(drawn.kept)
    root = Tree(Text.assemble((f"{drawn.words[0]} ", "bold"), ("root", "dim")), guide_style="dim")
    branches = {0: root}
    for node in sorted({0, *kept}, key=lambda n: (tree.depth[n], tree.rank(n))):
        if node:
            mark = "✓ " if node in drawn.accepted else "  "
            label = Text.assemble(
                (mark, "bold"),
                (drawn.words[node], f"{'bold ' if node in drawn.accepted else ''}{STYLES[tree.proposers[node]]}"),
                (f"  {math.exp(tree.log_s[node]):.2f}  {tree.proposers[node]}, step {drawn.step_of(node)}", "dim"),
            )
            branches[node] = branches[tree.parent[node]].add(label)
    for node, branch in branches.items():
        if dropped := [child for child in tree.children[node] if child not in kept]:
            branch.add(Text(f"  + {len(dropped)} drafted, not verified", "dim"))

    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("step", "drafter", "processed", "attached", "why"):
        table.add_column(column, justify="right" if column in ("processed", "attached") else "left")
    for k, step in enumerate(drawn.steps, start=1):
        style = STYLES[step.drafter]
        table.add_row(
            str(k), Text(step.drafter, style), str(step.processed or ""), str(len(step.attached)), Text(step.why)
        )
    said = Text.assemble(
        (f"round {drawn.number}", "bold"), f", after ... {_last_words(drawn, 10)}", overflow="ellipsis", no_wrap=True
    )
    return Group(said, root, table, Text(outcome(drawn)))


def outcome(drawn: DrawnRound) -> str:
    """What the round came to, in one sentence."""
    bonus = "" if drawn.bonus is None else f", and chose “{drawn.bonus}” itself"
    return (
        f"drafted {len(drawn.tree) - 1} nodes, verified {len(drawn.kept)} of them in one forward; "
        f"the target accepted {len(drawn.accepted)}{bonus}"
    )


def svg(drawn: DrawnRound) -> str:
    """The round as SVG: each node with the step that proposed it and its s, and below it the steps with their reasons.

    Green: small drafter; orange: medium drafter; filled: accepted by the target; faint: drafted but not verified.
    """
    tree, bottom = tree_parts(drawn, 78)
    width = max(COLUMN * max(drawn.tree.depth) + BOX + 40, 640)
    parts = [f'<text x="20" y="24" fill="#777">… {escape(_last_words(drawn, 12))}</text>', *_legend(46), *tree]
    y = bottom + 12
    for k, step in enumerate(drawn.steps, start=1):
        colour = COLOURS[step.drafter]
        did = f"{len(step.attached)} new" + (f", {step.processed} processed" if step.processed else "")
        parts.append(
            f'<circle cx="30" cy="{y - 4}" r="9" fill="{colour}"/>'
            f'<text x="30" y="{y}" text-anchor="middle" fill="#fff" font-size="11">{k}</text>'
            f'<text x="48" y="{y}" fill="{colour}" font-weight="600">{step.drafter}</text>'
            f'<text x="112" y="{y}" fill="#555">{did}</text>'
        )
        for line in wrap(step.why, (width - 260) // 7) or [""]:
            parts.append(f'<text x="240" y="{y}">{escape(line)}</text>')
            y += 17
        y += 5
    parts.append(f'<text x="20" y="{y + 4}" fill="#555">{escape(outcome(drawn))}</text>')
    return picture(width, round(y + 18), parts)


def tree_parts(drawn: DrawnRound, top: float) -> tuple[list[str], float]:
    """The tree alone as SVG elements, its first line of nodes at `top` px; and where it ends."""
    tree, height, parts = drawn.tree, heights(drawn.tree), []
    verified, path = {0, *drawn.kept}, {0, *drawn.accepted}
    for node in range(len(tree)):
        x, y = 20 + COLUMN * tree.depth[node], top + ROW * height[node]
        if node:
            px, py = x - COLUMN + BOX, top + ROW * height[tree.parent[node]]
            stroke = 'stroke="#222" stroke-width="2.5"' if node in path else 'stroke="#bbb"'
            curve = f"M{px} {py:.0f}C{px + 24} {py:.0f} {x - 24} {y:.0f} {x} {y:.0f}"
            parts.append(f'<path d="{curve}" fill="none" {stroke}/>')
    for node in range(len(tree)):
        x, y = 20 + COLUMN * tree.depth[node], top + ROW * height[node]
        parts.append(_node(drawn, node, x, y, node in verified, node in path))
    return parts, top + ROW * (1 + max(height))


def _last_words(drawn: DrawnRound, count: int) -> str:
    return " ".join(drawn.before.split()[-count:])


def heights(tree: DraftTree) -> list[float]:
    """The line of each node: leaves below each other, best s first; a parent in the middle of its children."""
    height = [0.0] * len(tree)
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
    return height


def _node(drawn: DrawnRound, node: int, x: float, y: float, verified: bool, accepted: bool) -> str:
    proposer = drawn.tree.proposers[node]
    colour = COLOURS[proposer]
    word = drawn.words[node]
    shown = word if len(word) <= (9 if node else 14) else word[: 8 if node else 13] + "…"
    parts = [
        f'<rect x="{x}" y="{y - 11:.0f}" width="{BOX}" height="22" rx="6" fill="#fff" stroke="none"/>'
        f'<rect x="{x}" y="{y - 11:.0f}" width="{BOX}" height="22" rx="6" fill="{colour}" '
        f'fill-opacity="{0.5 if accepted else 0.1}" stroke="{colour}"/>'
        f'<text x="{x + (16 if node else 8)}" y="{y + 4:.0f}" xml:space="preserve">{escape(shown)}</text>'
    ]
    if node:
        s, step = math.exp(drawn.tree.log_s[node]), drawn.step_of(node)
        parts.append(
            f'<circle cx="{x}" cy="{y:.0f}" r="8" fill="{colour}"/>'
            f'<text x="{x}" y="{y + 3.5:.1f}" text-anchor="middle" fill="#fff" font-size="10">{step}</text>'
            f'<text x="{x + BOX - 5}" y="{y + 4:.0f}" text-anchor="end" fill="#666" font-size="10">{s:.2f}</text>'
        )
    return f'<g opacity="{1 if verified else 0.35}">{"".join(parts)}</g>'


def _legend(y: int) -> list[str]:
    entries = [
        (20, COLOURS["small"], 0.1, 1, "small drafter"),
        (150, COLOURS["medium"], 0.1, 1, "medium drafter"),
        (294, "#777", 0.5, 1, "accepted by the target"),
        (474, "#777", 0.1, 0.4, "not verified"),
    ]
    return [
        f'<rect x="{x}" y="{y - 11}" width="22" height="14" rx="4" fill="{colour}" fill-opacity="{fill}" '
        f'stroke="{colour}" opacity="{opacity}"/><text x="{x + 29}" y="{y}" fill="#555">{name}</text>'
        for x, colour, fill, opacity, name in entries
    ]


def picture(width: float, height: float, parts: list[str]) -> str:
    """An SVG on white, so that it reads on a dark page too."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui,sans-serif" font-size="12">'
        f'<rect width="{width}" height="{height}" rx="8" fill="#fff"/>{"".join(parts)}</svg>\n'
    )
