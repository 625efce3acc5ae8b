"""Live benchmark: every schedule decodes every prompt in one process, interleaved, and the texts are compared."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from treegraft.data.prompts import Conversation, Prompt
from treegraft.runtime.decode import AUTOREGRESSIVE, ContextError, Plan, Round, check_prompt, decode, end_tokens
from treegraft.runtime.models import Model
from treegraft.runtime.ties import compare_texts
from treegraft.value_system import replay

GENERATE = "generate"
PARTS = ("target", "medium", "small", "signals", "rest")


@dataclass
class Record(replay.Record):
    """One prompt (all its turns) decoded by one schedule: a replay's figures and what only a live run knows."""

    first_token_ms: float
    different: int  # texts that differ from the target's own, float ties aside
    ties: int
    parts: dict[str, float]
    steps: list[int]  # rounds that called the medium drafter at step 1, 2, ...


def generate(target: Model, prompt: list[int], max_new_tokens: int) -> tuple[list[int], float]:
    """transformers' own greedy decoding: the answer's ids and its time in ms."""
    ids = torch.tensor([prompt], device=target.device)
    start = perf_counter()
    out: Any = target.lm.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        pad_token_id=min(end_tokens(target), default=0),
    )
    tokens = out[0, len(prompt) :].tolist()
    return tokens, (perf_counter() - start) * 1e3


def run(
    target: Model,
    medium: Model | None,
    prompts: list[Prompt],
    plans: list[Plan],
    max_new_tokens: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Record]:
    """Decode every prompt with `autoregressive`, `generate` and every plan, in a seeded random order per prompt.

    Each schedule is warmed up first, and every prompt is checked before any is decoded. A later turn of a conversation
    follows the target's own earlier answers. Raises ContextError for a prompt that is empty or too long.
    """
    plans = [plan for plan in plans if plan.name != AUTOREGRESSIVE.name]
    everything: list[Plan | None] = [None, AUTOREGRESSIVE, *plans]
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
    for done, prompt in enumerate(prompts):
        progress(done, len(prompts))
        mine = {plan.name if plan else GENERATE: _record(prompt, plan) for plan in everything}
        conversation = Conversation(prompt, target.tokenizer)
        for turn in range(conversation.turns):
            ids = conversation.ids(turn)
            answers = {}
            for plan in order.sample(everything, len(everything)):
                record = mine[plan.name if plan else GENERATE]
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
                verdict = compare_texts(target, ids, tokens, answers[GENERATE])
                mine[name].different += verdict == "different"
                mine[name].ties += verdict == "tie"
            conversation.answer(answers[GENERATE])
        records += mine.values()
    progress(len(prompts), len(prompts))
    return records


def _record(prompt: Prompt, plan: Plan | None) -> Record:
    name = plan.name if plan else GENERATE
    steps = [0] * (plan.drafting.depth if plan else 0)
    return Record(prompt.file, prompt.id, name, 0, 0.0, 0, 0, 0, 0.0, 0, 0, dict.fromkeys(PARTS, 0.0), steps)


def _decode(
    target: Model, medium: Model | None, ids: list[int], plan: Plan | None, max_new_tokens: int
) -> tuple[list[int], float, float, list[Round]]:
    """Tokens, ms, ms to the first token (unknown to `generate`: 0) and rounds."""
    if plan is None:
        tokens, ms = generate(target, ids, max_new_tokens)
        return tokens, ms, 0.0, []
    decoded = decode(target, medium, ids, plan, max_new_tokens)
    return decoded.tokens, decoded.total_ms, decoded.first_token_ms, decoded.rounds


def as_autoregressive(records: list[Record]) -> list[Record]:
    """The records with one baseline: our one-token loop, in `generate`'s time where that is less over all of them."""
    theirs = {(r.file, r.prompt): r for r in records if r.schedule == GENERATE}
    ours = [r for r in records if r.schedule == AUTOREGRESSIVE.name]
    faster = sum(r.ms for r in theirs.values()) < sum(r.ms for r in ours)
    kept = [r for r in records if r.schedule not in (GENERATE, AUTOREGRESSIVE.name)]
    return [replace(r, ms=theirs[r.file, r.prompt].ms) if faster else r for r in ours] + kept


def summarise_live(records: list[Record]) -> dict[str, Any]:
    """Figures by file and overall: what `evaluate` gives, and what only a live run knows (texts, times by part)."""
    records = as_autoregressive(records)
    summary = replay.summarise(records)
    groups: list[tuple[dict[str, Any], list[Record]]] = [(summary["overall"], records)]
    groups += [(of_file, [r for r in records if r.file == file]) for file, of_file in summary["by_file"].items()]
    for schedules, of_group in groups:
        for name, figures in schedules.items():
            mine = [r for r in of_group if r.schedule == name]
            figures["text_equal"] = not any(r.different for r in mine)
            figures["texts_different"] = sum(r.different for r in mine)
            figures["ties"] = sum(r.ties for r in mine)
            figures["time_to_first_token_ms"] = sum(r.first_token_ms for r in mine) / len(mine)
            figures["time_ms"] = {part: sum(r.parts[part] for r in mine) for part in PARTS}
    return summary
