"""Live benchmark: every schedule decodes every prompt in one process, interleaved, and the texts are compared.

So do transformers' own ways to decode the same models: `generate`, prompt lookup and assisted generation.
"""

import copy
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from treegraft import report
from treegraft.data.prompts import Conversation, Prompt
from treegraft.runtime.attention import COARSE
from treegraft.runtime.decode import AUTOREGRESSIVE, ContextError, Plan, Round, check_prompt, decode, end_tokens
from treegraft.runtime.models import Model
from treegraft.runtime.ties import compare_texts
from treegraft.value_system import replay

PARTS = ("target", "medium", "small", "signals", "tree", "rest")
LOOKUPS = (3, 5, 10)  # tokens that prompt lookup proposes at most
BEST_RIVAL = "best rival"


@dataclass(frozen=True)
class Rival:
    """One of transformers' own ways to decode greedily: `options` go to its `generate`."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


GENERATE = Rival("generate")


def hugging_face(medium: Model) -> list[Rival]:
    """Prompt lookup, and assisted generation with the draft length that transformers adapts by confidence."""
    lookups = [Rival(f"prompt lookup {count}", {"prompt_lookup_num_tokens": count}) for count in LOOKUPS]
    return [*lookups, Rival("assisted", {"assistant_model": assistant(medium)})]


def assistant(medium: Model) -> Any:
    """The medium drafter's weights as transformers' assistant: a reduced draft vocabulary's logits, scattered."""
    lm: Any = copy.copy(medium.lm)
    if medium.draft_vocabulary is not None:
        lm._modules = dict(lm._modules)  # a head of its own; all other modules are shared
        head = _FullHead(lm.get_output_embeddings(), medium.draft_vocabulary, medium.embeds)
        lm.set_output_embeddings(head)
    return lm


class _FullHead(torch.nn.Module):
    """A head over the draft vocabulary that gives logits over all `size` tokens, -inf for the others."""

    def __init__(self, head: torch.nn.Module, vocabulary: torch.Tensor, size: int):
        super().__init__()
        self.head, self.vocabulary, self.size = head, vocabulary, size

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden)
        full = logits.new_full((*logits.shape[:-1], self.size), -torch.inf)
        full[..., self.vocabulary] = logits
        return full


class _FirstToken(BaseStreamer):
    """Notes when `generate` emits its first new token; what it is given first is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(perf_counter())

    def end(self) -> None:
        pass


@dataclass
class Record(replay.Record):
    """One prompt (all its turns) decoded by one schedule: a replay's figures and what only a live run knows."""

    first_token_ms: float
    different: int  # texts that are not the target's own, float ties aside
    ties: int
    unconfirmed: int  # texts that differ where a float tie could neither be confirmed nor ruled out
    parts: dict[str, float]
    steps: list[int]  # rounds that called the medium drafter at step 1, 2, ...


def generate(
    target: Model, prompt: list[int], max_new_tokens: int, rival: Rival = GENERATE
) -> tuple[list[int], float, float]:
    """transformers' own greedy decoding: the answer's ids, its time and the time to its first token, in ms."""
    ids = torch.tensor([prompt], device=target.device)
    arrived = _FirstToken()
    start = perf_counter()
    out: Any = target.lm.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        pad_token_id=min(end_tokens(target), default=0),
        streamer=arrived,
        **rival.options,
    )
    tokens = out[0, len(prompt) :].tolist()
    ms = (perf_counter() - start) * 1e3
    return tokens, ms, (arrived.times[1] - start) * 1e3


def run(
    target: Model,
    medium: Model | None,
    prompts: list[Prompt],
    plans: list[Plan],
    max_new_tokens: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    rivals: list[Rival] = [],  # noqa: B006
    stop: Callable[[], bool] = lambda: False,
) -> tuple[list[Record], list[dict[str, str]]]:
    """Decode every prompt with `autoregressive`, `generate`, every plan and rival, in a seeded random order per prompt.

    Each schedule is warmed up first, and every prompt is checked before any is decoded. The files take turns, so that a
    run cut short has seen them all: `stop` is asked after each prompt. Returns the records of the prompts that were
    finished, and those that failed ("file", "prompt", "error"), which harm no other. Raises ContextError for a prompt
    that is empty or too long, ValueError where every prompt failed.
    """
    plans = [plan for plan in plans if plan.name != AUTOREGRESSIVE.name]
    everything: list[Plan | Rival] = [GENERATE, AUTOREGRESSIVE, *rivals, *plans]
    deepest = max((plan.drafting.depth for plan in plans), default=0)
    for prompt in prompts:
        try:
            check_prompt(target, Conversation(prompt, target.tokenizer).ids(0), max_new_tokens, deepest)
        except ContextError as error:
            raise ContextError(f"{prompt.file}/{prompt.id}: {error}") from error
    order = random.Random(0)
    warm = Conversation(prompts[0], target.tokenizer).ids(0)
    for plan in everything:
        _decode(target, medium, warm, plan, 8)
    records: list[Record] = []
    failed: list[dict[str, str]] = []
    progress(0, len(prompts))
    for done, prompt in enumerate(in_turns(prompts), 1):
        try:
            records += _decode_prompt(target, medium, prompt, everything, order, max_new_tokens)
        except Exception as error:
            told = f"{type(error).__name__}: {' '.join(str(error).split())}"
            failed.append({"file": prompt.file, "prompt": prompt.id, "error": told})
        progress(done, len(prompts))
        if stop():
            break
    if not records:
        raise ValueError("no prompt could be decoded; {file}/{prompt}: {error}".format(**failed[0]))
    return records, failed


def _decode_prompt(
    target: Model,
    medium: Model | None,
    prompt: Prompt,
    everything: list[Plan | Rival],
    order: random.Random,
    max_new_tokens: int,
) -> list[Record]:
    """A prompt's record of each schedule. A later turn follows the target's own earlier answers.

    Those are `generate`'s, and texts are held against them; in 16 bits the one-token loop's, whose rounding is ours.
    """
    reference = (AUTOREGRESSIVE if target.lm.dtype in COARSE else GENERATE).name
    mine = {plan.name: _record(prompt, plan) for plan in everything}
    conversation = Conversation(prompt, target.tokenizer)
    for turn in range(conversation.turns):
        ids = conversation.ids(turn)
        answers = {}
        for plan in order.sample(everything, len(everything)):
            record = mine[plan.name]
            tokens, ms, first, rounds = _decode(target, medium, ids, plan, max_new_tokens)
            answers[record.schedule] = tokens
            record.tokens += len(tokens)
            record.ms += ms
            record.first_token_ms += first / conversation.turns
            record.rounds += len(rounds)
            record.medium_calls += sum(r.medium_calls for r in rounds)
            record.accepted += sum(r.accepted for r in rounds)
            record.steps = [sum(r.mask >> k & 1 for r in rounds) + n for k, n in enumerate(record.steps)]
            for part in PARTS:
                record.parts[part] += sum(r.ms[part] for r in rounds)
        for name, tokens in answers.items():
            verdict = compare_texts(target, ids, tokens, answers[reference])
            mine[name].different += verdict == "different"
            mine[name].ties += verdict == "tie"
            mine[name].unconfirmed += verdict == "unconfirmed"
        conversation.answer(answers[reference])
    return list(mine.values())


def in_turns(prompts: list[Prompt]) -> list[Prompt]:
    """The first prompt of every file, then the second of every file, and so on."""
    nth: Counter[str] = Counter()
    turns = []
    for prompt in prompts:
        turns.append(nth[prompt.file])
        nth[prompt.file] += 1
    return [prompt for _, prompt in sorted(zip(turns, prompts, strict=True), key=lambda pair: pair[0])]


def _record(prompt: Prompt, plan: Plan | Rival) -> Record:
    steps = [0] * (plan.drafting.depth if isinstance(plan, Plan) else 0)
    return Record(prompt.file, prompt.id, plan.name, 0, 0.0, 0, 0, 0, 0.0, 0, 0, 0, dict.fromkeys(PARTS, 0.0), steps)


def _decode(
    target: Model, medium: Model | None, ids: list[int], plan: Plan | Rival, max_new_tokens: int
) -> tuple[list[int], float, float, list[Round]]:
    """Tokens, ms, ms to the first token, and rounds (a rival's are unknown)."""
    if isinstance(plan, Rival):
        return *generate(target, ids, max_new_tokens, plan), []
    decoded = decode(target, medium, ids, plan, max_new_tokens)
    return decoded.tokens, decoded.total_ms, decoded.first_token_ms, decoded.rounds


def as_autoregressive(records: list[Record]) -> list[Record]:
    """The records with one baseline: our one-token loop, in `generate`'s time where that is less over all of them."""
    theirs = {(r.file, r.prompt): r for r in records if r.schedule == GENERATE.name}
    ours = [r for r in records if r.schedule == AUTOREGRESSIVE.name]
    faster = sum(r.ms for r in theirs.values()) < sum(r.ms for r in ours)
    kept = [r for r in records if r.schedule not in (GENERATE.name, AUTOREGRESSIVE.name)]
    return [replace(r, ms=theirs[r.file, r.prompt].ms) if faster else r for r in ours] + kept


def best_rivals(records: list[Record], rivals: list[Rival]) -> dict[str, str]:
    """Of each file, the rival that was fastest over all of its prompts: chosen in hindsight, to the rivals' favour."""
    ms: dict[str, dict[str, float]] = {}
    for record in records:
        if record.schedule in {rival.name for rival in rivals}:
            of_file = ms.setdefault(record.file, {})
            of_file[record.schedule] = of_file.get(record.schedule, 0.0) + record.ms
    return {file: min(of_file, key=lambda name: of_file[name]) for file, of_file in ms.items()}


def summarise_live(records: list[Record], rivals: list[Rival] = []) -> dict[str, Any]:  # noqa: B006
    """Figures by file and overall: what `evaluate` gives, and what only a live run knows (texts, times by part).

    With `rivals`, `generate` and they have figures too, and so has `best rival`: each file's fastest, as "best_rival"
    says. "over" compares every schedule with it, paired by prompt.
    """
    shown = as_autoregressive(records)
    if rivals:
        rivals = [GENERATE, *rivals]
        best = best_rivals(records, rivals)
        shown += [r for r in records if r.schedule == GENERATE.name]
        shown += [replace(r, schedule=BEST_RIVAL) for r in records if r.schedule == best[r.file]]
    summary = replay.summarise(shown)
    groups: list[tuple[dict[str, Any], list[Record]]] = [(summary["overall"], shown)]
    groups += [(of_file, [r for r in shown if r.file == file]) for file, of_file in summary["by_file"].items()]
    for schedules, of_group in groups:
        for name, figures in schedules.items():
            mine = [r for r in of_group if r.schedule == name]
            figures["text_equal"] = not any(r.different or r.unconfirmed for r in mine)
            figures["texts_different"] = sum(r.different for r in mine)
            figures["ties"] = sum(r.ties for r in mine)
            figures["unconfirmed"] = sum(r.unconfirmed for r in mine)
            figures["time_to_first_token_ms"] = sum(r.first_token_ms for r in mine) / len(mine)
            figures["time_ms"] = {part: sum(r.parts[part] for r in mine) for part in PARTS}
    return {**summary, "best_rival": best} if rivals else summary


def report_page(summary: dict[str, Any]) -> str:
    """The HTML report of a summary: bars and tables overall and by file, the time by part, and the rivals."""
    overall = summary["overall"]
    speed = (
        "Total tokens over total time against the faster of our one-token loop and transformers' generate. "
        "The lines are 95 % intervals, bootstrapped over prompts."
    )
    parts = "Shares of the rounds' time, the prompt's forward aside."
    sections = [
        ("Speed", speed, report.bars(overall) + report.table(overall)),
        ("Where a round's time goes", parts, report.split(overall)),
    ]
    if best := summary.get("best_rival"):
        chosen = "Each file's fastest, chosen in hindsight: " + ", ".join(f"{f}: {name}" for f, name in best.items())
        sections.append(("Over the best rival", chosen, report.over(overall, BEST_RIVAL)))
    sections += [(file, "", report.bars(m) + report.table(m)) for file, m in summary["by_file"].items()]
    return report.page(sections, "TreeGraft bench")
