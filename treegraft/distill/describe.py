"""What an artifact will do, in words and bars."""

from collections.abc import Iterator

from treegraft.distill.rules import sentences
from treegraft.runtime.scheduler import Artifact, Mask, Rules, TreeModel
from treegraft.runtime.signals import SIGNALS

BAR = 20  # characters for all rounds


def describe(artifact: Artifact) -> str:
    """The schedule, how often it calls the medium drafter and where, and what it is worth; lines of plain text."""
    return "\n".join([*_schedule(artifact), *_calls(artifact), *_worth(artifact), *_origin(artifact)])


def _schedule(artifact: Artifact) -> Iterator[str]:
    schedule, shape = artifact.schedule, artifact.drafting
    yield (
        f"Drafts trees of K = {shape['depth']} steps, W = {shape['width']} frontier nodes, m = {shape['children']} "
        f"children each, and verifies at most B = {shape['budget']} nodes."
    )
    if shape["medium_calls"] is not None:
        yield f"Calls the medium drafter at most {shape['medium_calls']} times a round."
    if isinstance(schedule, Mask):
        steps = [str(k) for k in range(1, shape["depth"] + 1) if schedule.decide(k, 0, {})]
        yield f"Always calls the medium drafter at step {', '.join(steps)}." if steps else "Never calls it."
    elif isinstance(schedule, Rules):
        yield from sentences(schedule)
        if schedule.rules:
            yield "Otherwise the step is the small drafter's."
    else:
        yield from _branch(schedule, 0, "")
    if schedule.reads:
        yield "It reads:"
        yield from (f"  {name}: {SIGNALS[name].definition}" for name in schedule.reads)
        yield f"Where one of these is missing or not finite, it follows the mask {_mask(artifact.fallback, artifact)}."


def _branch(tree: TreeModel, node: int, indent: str) -> Iterator[str]:
    if tree.feature[node] < 0:
        does = "call the medium drafter" if tree.value[node] > 0 else "leave the step to the small drafter"
        yield f"{indent}{does} (margin {tree.value[node]:+.3f} tokens)"
        return
    yield f"{indent}if {tree.reads[tree.feature[node]]} is at most {tree.threshold[node]:.4g}:"
    yield from _branch(tree, tree.left[node], indent + "  ")
    yield f"{indent}else:"
    yield from _branch(tree, tree.right[node], indent + "  ")


def _calls(artifact: Artifact) -> Iterator[str]:
    shares = artifact.expected.get("calls", {})
    if shares:
        yield "Rounds of the training log in which it calls the medium drafter, by step:"
    for step, share in enumerate(shares.get("overall", ()), start=1):
        yield f"  step {step}  {'#' * round(share * BAR):.<{BAR}} {share:6.1%}"
    for name, by_step in shares.items():
        yield f"  {name}: {sum(by_step):.2f} calls a round"


def _worth(artifact: Artifact) -> Iterator[str]:
    if not artifact.expected.get("overall"):
        return
    yield "Tokens per second on held-out prompts, by replay, as a multiple (95 % interval) of those of"
    groups = {"overall": artifact.expected["overall"], **artifact.expected.get("by_file", {})}
    for group, gains in groups.items():
        for base, found in gains.items():
            low, high = found["interval"]
            verdict = ": faster" if low > 1 else ": slower" if high < 1 else ": no difference beyond noise"
            yield f"  {group}, {base}: {found['gain']:.3f} ({low:.3f} .. {high:.3f}){verdict}"


def _origin(artifact: Artifact) -> Iterator[str]:
    cut, models = artifact.cut, artifact.models
    if cut["kind"] == "worth":
        yield f"It expects {1e3 * cut['rho']:.4g} tokens per second of the machine {cut['profile']['machine']!r}."
    yield f"Trained with target {models.get('target')} and medium drafter {models.get('medium')}."
    yield f"Training log {artifact.log}; {len(artifact.vectors)} test vectors; sha256 {artifact.sha256}."


def _mask(bits: int, artifact: Artifact) -> str:
    return f"{bits:#0{artifact.drafting['depth'] + 2}b}"
