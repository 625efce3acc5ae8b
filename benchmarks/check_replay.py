"""Does replay equal live decoding? Collects the prompts, replays schedules on the log, decodes them live, compares.

    python benchmarks/check_replay.py --schedule runs/demo/scheduler.json --limit 2 PROMPTS.jsonl...

Compared by round: position, lag, mask, nodes verified, medium calls and their tokens, accepted tokens. A difference is
forgiven, and counted, where two compared values lie within 1e-5 of each other (batched forwards round differently);
what follows it in that answer is another trajectory and not compared.
"""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from treegraft.collect.collector import Sampling, collect
from treegraft.data.log import read_log
from treegraft.data.prompts import Conversation, read_prompts
from treegraft.runtime.decode import Plan, Round, decode
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.latency import LatencyProfile
from treegraft.runtime.models import load_model
from treegraft.runtime.plan import make_plan
from treegraft.runtime.size import Cut
from treegraft.value_system.replay import flatten, replay

NEAR = 1e-5
PROFILE = LatencyProfile.what_if(0.3)  # any serves: prices do not touch a replay's rounds, the plan's own cut does
FIELDS = ("position", "lag", "mask", "kept", "accepted", "tokens")


def main(
    prompts: list[Path],
    schedule: Annotated[list[str], typer.Option()],
    target: str = "default",
    medium: str = "default-medium",
    medium_dtype: str = "float32",
    limit: int = 2,
    max_new_tokens: int = 128,
) -> None:
    models = load_model(target, dtype="float32"), load_model(medium, dtype=medium_dtype)
    plans = [make_plan(name, Drafting(), Cut("score", log_s=-2.5)) for name in schedule]
    wanted = read_prompts(prompts, limit)
    with tempfile.TemporaryDirectory() as folder:
        collect(*models, wanted, Path(folder), plans[0].drafting, Sampling(), max_new_tokens)
        _, answers = read_log(Path(folder))
    log = flatten(answers)
    counts: Counter[str] = Counter()
    for plan in plans:
        trace = replay(log, plan.schedule, plan.cut, PROFILE, plan.drafting).trace
        for index, answer in enumerate(log.answers):
            if answer.turn:
                continue  # later turns need the earlier answers as context
            prompt = next(p for p in wanted if (p.file, p.id) == (answer.file, answer.prompt))
            live = decode(*models, Conversation(prompt, models[0].tokenizer).ids(0), plan, max_new_tokens)
            mine = trace["answer"] == index
            verdict, rounds = compare(live.rounds, {name: trace[name][mine] for name in FIELDS}, log, index, plan)
            counts[f"answers {verdict}"] += 1
            counts["rounds equal"] += rounds
            if verdict != "equal":
                print(f"{answer.file}/{answer.prompt} {plan.name}: {verdict} after {rounds} equal rounds", flush=True)
    print(dict(counts))


def compare(live: list[Round], replayed: dict[str, np.ndarray], log, index: int, plan: Plan) -> tuple[str, int]:  # type: ignore[no-untyped-def]
    """("equal", "near" or "different", rounds that were equal)."""
    for i in range(max(len(live), len(replayed["position"]))):
        if i >= min(len(live), len(replayed["position"])):
            return "different", i
        done = live[i]
        there = {name: replayed[name][i].tolist() for name in FIELDS}
        here = {name: getattr(done, name) for name in FIELDS}
        if here != there:
            return ("near" if near(done, there, log, index, plan) else "different"), i
    return "equal", len(live)


def near(done: Round, there: dict, log, index: int, plan: Plan) -> bool:  # type: ignore[no-untyped-def]
    """Whether some pair of values compared in this round lies within 1e-5."""
    row = log.first[index] + done.position
    log_s = log.log_s[row, there["mask"]].astype(np.float64)
    log_s = log_s[np.isfinite(log_s)]
    s = np.exp(log_s)
    if np.any(np.abs(np.diff(s)) <= NEAR):
        return True
    if plan.cut.kind == "score":
        return bool(np.any(np.abs(log_s - plan.cut.log_s) <= NEAR))
    if plan.cut.kind == "worth":
        worth = np.concatenate([[0], s.cumsum()]) - plan.cut.rho * plan.cut.profile.target(  # type: ignore[union-attr]
            np.arange(len(s) + 1) + 1, log.context[row]
        )
        best = np.sort(worth)[-2:]
        return bool(best[1] - best[0] <= NEAR)
    return False


if __name__ == "__main__":
    typer.run(main)
