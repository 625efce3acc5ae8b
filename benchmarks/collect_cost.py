"""What does a log of every schedule cost? One process compares, on the same prompts:

    separate    decoding the text once with each of the 2^K schedules (a seeded sample of them, extrapolated)
    collector   `treegraft collect` at every position, its files included
    all-medium  one decode of the text with the medium drafter at every step

    python benchmarks/collect_cost.py --limit 1 --max-new-tokens 64 [PROMPTS.jsonl...]

Times are CPU seconds of this one-threaded process, which other work on the machine disturbs less than wall time.
Forwards and their tokens are counted. Then where the collector's time goes, by a profiler (which inflates Python).
"""

import cProfile
import pstats
import random
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Annotated, Any

import torch
import typer

from treegraft.collect import fork
from treegraft.collect.collector import Sampling, collect
from treegraft.data import log
from treegraft.data.prompts import Conversation, Prompt, read_prompts, shipped
from treegraft.runtime import decode as decoder
from treegraft.runtime import signals
from treegraft.runtime.decode import Plan, decode
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.medium import LMDrafter
from treegraft.runtime.models import Model, load_model
from treegraft.runtime.scheduler import Mask
from treegraft.runtime.size import Cut

CUT = Cut("score", log_s=-2.5)
PARTS = {
    "decoding the answer": decoder.decode,
    "medium forwards of the forks": LMDrafter.process,
    "small steps": fork.small_step,
    "medium steps": fork.medium_step,
    "planning medium steps": fork.plan_medium,
    "signals": signals.compute,
    "leaves": fork.leaf_facts,
    "tables": log.encode,
    "files": log.write_part,
}


def main(
    prompts: Annotated[list[Path] | None, typer.Argument()] = None,
    target: str = "default",
    medium: str = "default-medium",
    medium_dtype: str = "bfloat16",
    limit: int = 1,
    max_new_tokens: int = 64,
    schedules: Annotated[int, typer.Option(help="Sampled for `separate`.")] = 4,
) -> None:
    torch.set_num_threads(1)
    models = {"target": load_model(target, dtype="float32"), "medium": load_model(medium, dtype=medium_dtype)}
    pair = models["target"], models["medium"]
    counts = count_forwards(models)
    drafting = Drafting()
    wanted = read_prompts(prompts or shipped("train"), limit)
    spent: dict[str, float] = defaultdict(float)
    forwards: dict[str, dict[str, float]] = {
        name: defaultdict(float) for name in ("separate", "collector", "all-medium")
    }
    generator = random.Random(0)

    def measure(name: str, work: Callable[[], Any], times: float = 1.0) -> None:
        counts.clear()
        start = process_time()
        work()
        spent[name] += (process_time() - start) * times
        for key, count in counts.items():
            forwards[name][key] += count * times

    def by_mask(prompt: Prompt, mask: int) -> None:
        conversation = Conversation(prompt, pair[0].tokenizer)
        for turn in range(conversation.turns):
            plan = Plan("mask", Mask(mask), drafting, CUT)
            conversation.answer(decode(*pair, conversation.ids(turn), plan, max_new_tokens).tokens)

    every = (1 << drafting.depth) - 1
    by_mask(wanted[0], every)  # the first forwards of a process are slower
    with tempfile.TemporaryDirectory() as folder:
        work: dict[str, Any] = {"drafting": drafting, "sampling": Sampling(), "max_new_tokens": max_new_tokens}
        for index, prompt in enumerate(wanted):
            measure("all-medium", lambda: by_mask(prompt, every))  # noqa: B023
            measure("collector", lambda: collect(*pair, wanted[: index + 1], Path(folder, "log"), **work))  # noqa: B023
            for mask in generator.sample(range(every + 1), schedules):
                measure("separate", lambda: by_mask(prompt, mask), (every + 1) / schedules)  # noqa: B023
        manifest = log.read_manifest(Path(folder, "log"))
        profiler = cProfile.Profile()
        profiler.runcall(collect, *pair, wanted[:2], Path(folder, "profiled"), **work)
    report(manifest, drafting, spent, forwards)
    profile(profiler)


def count_forwards(models: dict[str, Model]) -> Counter[str]:
    """A counter that from now on holds the forwards of each model and their tokens."""
    counts: Counter[str] = Counter()
    for role, model in models.items():

        def count(module: Any, arguments: Any, keywords: dict[str, Any], role: str = role) -> None:
            counts[f"{role} forwards"] += 1
            counts[f"{role} tokens"] += keywords["input_ids"].shape[-1]

        model.lm.register_forward_pre_hook(count, with_kwargs=True)
    return counts


def report(
    manifest: dict[str, Any], drafting: Drafting, spent: dict[str, float], forwards: dict[str, dict[str, float]]
) -> None:
    positions = sum(part["leaves"]["rows"] for part in manifest["parts"]) >> drafting.depth
    size = sum(part[table]["bytes"] for part in manifest["parts"] for table in log.TABLES)
    print(f"{len(manifest['parts'])} prompts, {positions} positions, {size / positions:.0f} bytes a position")
    columns = [f"{role} {what}" for role in ("target", "medium") for what in ("forwards", "tokens")]
    print(f"{'':12}{'CPU s':>10}{'ms/position':>13}" + "".join(f"{column:>17}" for column in columns))
    for name, counted in forwards.items():
        times = f"{spent[name]:10.1f}{1e3 * spent[name] / positions:13.1f}"
        print(f"{name:12}{times}" + "".join(f"{counted[column]:17.0f}" for column in columns))
    print(f"the collector is {spent['separate'] / spent['collector']:.1f} times cheaper than separate decoding and "
          f"costs {spent['collector'] / spent['all-medium']:.2f} times an all-medium decode")  # fmt: skip


def profile(profiler: cProfile.Profile) -> None:
    stats: dict[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    inclusive = {(key[0], key[1]): value[3] for key, value in stats.items()}
    total = max(inclusive.values())
    left = total
    for name, function in PARTS.items():
        code = function.__code__
        seconds = inclusive.get((code.co_filename, code.co_firstlineno), 0.0)
        left -= seconds
        print(f"{seconds / total:7.1%}  {name}")
    print(f"{left / total:7.1%}  the rest")


if __name__ == "__main__":
    typer.run(main)
