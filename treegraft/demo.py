"""`treegraft demo`: the whole pipeline on the default models and the package's own prompts, in about ten minutes."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import joblib
import psutil
from rich.console import Console

from treegraft import bench, report
from treegraft.collect.collector import Engine, collect_with
from treegraft.collect.processes import process_engine
from treegraft.collect.worker import Sampling, Settings, Worker
from treegraft.data.log import read_log
from treegraft.data.prompts import Conversation, read_prompts, shipped
from treegraft.distill.distill import distill
from treegraft.draw import most_telling, svg, watch
from treegraft.runtime.decode import Plan
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.measure import call_ms, measure_profile
from treegraft.runtime.models import DEFAULT_MEDIUM, DEFAULT_TARGET, Model, check_pair, load_model
from treegraft.runtime.plan import plan_from_artifact
from treegraft.runtime.scheduler import Mask, load_artifact
from treegraft.value_system.replay import best_mask, named_plan
from treegraft.value_system.value import fit_value

COLLECT = {"limit": 20, "max_new_tokens": 64}
MOST_WORKERS = 8  # beyond so many, processes wait for each other's memory traffic
WORKER_BYTES = 3 * 2**30  # of memory, at most, that a process with both models takes
BENCH = {"limit": 2, "max_new_tokens": 48}
BEST_MASK = "best mask"


def run_demo(out: Path, console: Console, progress: Callable[[str], Any]) -> dict[str, Any]:
    """Profile, collect, fit, distill and bench into `out`; returns the summary that bench.json holds."""
    start = perf_counter()

    def say(text: str) -> None:
        console.print(f"[{perf_counter() - start:4.0f} s] {text}", markup=False, highlight=False)

    out.mkdir(parents=True, exist_ok=True)
    drafting = Drafting()
    say("loading the default target (SmolLM2-135M-Instruct) and its medium drafter")
    target = load_model(DEFAULT_TARGET)
    # The drafter's precision does not touch the text, so it takes whichever this machine runs faster.
    candidates = {dtype: load_model(DEFAULT_MEDIUM, dtype=dtype) for dtype in ("float32", "bfloat16")}
    times = {dtype: call_ms(model) for dtype, model in candidates.items()}
    medium = candidates[min(times, key=lambda dtype: times[dtype])]
    check_pair(target, medium)
    say("a medium call of 4 tokens: " + ", ".join(f"{ms:.1f} ms in {dtype}" for dtype, ms in times.items()))

    say("profile: what a target forward and a medium call cost on this machine")
    train = read_prompts(shipped("train"), COLLECT["limit"])
    profile = measure_profile(target, medium, Conversation(train[0], target.tokenizer).ids(0), drafting)
    profile.save(out / "latency.json")

    say(f"collect: {len(train)} training prompts, all {1 << drafting.depth} schedules at every position")
    how = Settings(drafting, Sampling(), COLLECT["max_new_tokens"])
    with progress("collecting") as update, _engine(target, medium, how) as engine:
        collect_with(engine, train, out / "log", progress=update)

    say("fit-value: when is a call of the medium drafter worth its time?")
    fitted = fit_value(out / "log", profile, out / "value")
    say(f"signals selected: {', '.join(fitted['signals'])}")

    say("distill: compress that into a scheduler that ships")
    say(distill(out / "value", out / "scheduler.json")["summary"])

    answers = read_log(out / "log")[1]
    bits = best_mask(answers, profile, drafting)
    learned = plan_from_artifact(load_artifact(out / "scheduler.json"), "treegraft")
    names = fixed_schedules(bits, drafting.depth)
    plans = [named_plan(name, Mask(mask), answers, profile, drafting) for mask, name in names.items()] + [learned]

    prompts = read_prompts(shipped("bench"), BENCH["limit"])
    say(f"bench: {len(prompts)} other prompts, live, every schedule interleaved in one process")
    with progress("benching") as update:
        records, failed = bench.run(target, medium, prompts, plans, BENCH["max_new_tokens"], update)
    for failure in failed:
        say("failed: {file}/{prompt}: {error}".format(**failure))
    summary = summarise(records, bits, drafting.depth)
    (out / "bench.json").write_text(json.dumps(summary, indent=1) + "\n")
    ids = Conversation(prompts[0], target.tokenizer).ids(0)
    rounds = watch(target, medium, learned, ids, BENCH["max_new_tokens"])
    picture = svg(most_telling(rounds)) if rounds else ""
    (out / "report.html").write_text(_page(summary, records, learned, picture, drafting))
    say(f"done; everything is in {out}, the pictures in {out / 'report.html'}")
    return summary


def fixed_schedules(best: int, depth: int) -> dict[int, str]:
    """The masks to decode by and their names; the best one has its own where it is neither small nor medium."""
    names = {0: "small", (1 << depth) - 1: "medium"}
    names.setdefault(best, BEST_MASK)
    return names


def summarise(records: list[bench.Record], best: int, depth: int) -> dict[str, Any]:
    """The live figures, always with those of `best mask`, and which mask that is."""
    if (name := fixed_schedules(best, depth)[best]) != BEST_MASK:
        records = records + [replace(r, schedule=BEST_MASK) for r in records if r.schedule == name]
    return {"best_mask": f"{best:#0{depth + 2}b}", **bench.summarise_live(records)}


def for_readers(summary: dict[str, Any]) -> dict[str, Any]:
    """The overall figures, the best mask's under a name that says which it is."""
    told = {BEST_MASK: f"{BEST_MASK} {summary['best_mask']}"}
    return {told.get(name, name): figures for name, figures in summary["overall"].items()}


def _engine(target: Model, medium: Model, how: Settings) -> AbstractContextManager[Engine]:
    """A process for every core, as far as memory goes; this one where that is no more than one."""
    workers = min(MOST_WORKERS, joblib.cpu_count(), psutil.virtual_memory().available // WORKER_BYTES)
    if workers < 2:
        return nullcontext(Worker(target, medium, how))
    dtype, medium_dtype = (str(model.lm.dtype).removeprefix("torch.") for model in (target, medium))
    return process_engine(partial(Worker.load, target.name, medium.name, "cpu", dtype, medium_dtype, how), workers)


def _page(summary: dict[str, Any], records: list[bench.Record], learned: Plan, picture: str, drafting: Drafting) -> str:
    mine = [r for r in records if r.schedule == learned.name]
    shares = {}
    for file in sorted({r.file for r in mine}):
        of_file = [r for r in mine if r.file == file]
        rounds = sum(r.rounds for r in of_file) or 1
        shares[file] = [sum(r.steps[k] for r in of_file) / rounds for k in range(drafting.depth)]
    speed = (
        "Total tokens over total time against the faster of our one-token loop and transformers' generate. "
        "The lines are 95 % intervals, bootstrapped over prompts."
    )
    tree = (
        "Each node: the step that proposed it, its token, and s, the product of the probabilities from the root on. "
        "Below it, each step's drafter and why it was chosen."
    )
    overall = for_readers(summary)
    return report.page(
        [
            ("Speed", speed, report.bars(overall) + report.table(overall)),
            ("Where the medium drafter is called", "Share of the learned schedule's rounds.", report.calls(shares)),
            ("One real round", tree, picture),
        ]
    )
