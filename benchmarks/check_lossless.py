"""Do all schedules give the target's own text? Greedy against `generate`, and one sampled text against itself.

    python benchmarks/check_lossless.py --schedule small --schedule medium --schedule 0b00101 \
        --schedule runs/demo/scheduler.json --limit 2 PROMPTS.jsonl...

Differences are forgiven only at float ties (treegraft.runtime.ties), which are counted.
"""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from treegraft.bench import generate
from treegraft.data.prompts import Conversation, read_prompts
from treegraft.runtime.decode import AUTOREGRESSIVE, decode
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.models import load_model
from treegraft.runtime.plan import make_plan
from treegraft.runtime.sampling import Chooser
from treegraft.runtime.size import Cut
from treegraft.runtime.ties import compare_texts


def main(
    prompts: list[Path],
    schedule: Annotated[list[str], typer.Option()],
    target: str = "default",
    medium: str = "default-medium",
    medium_dtype: str = "float32",
    limit: int = 2,
    sampled_limit: int = 4,
    max_new_tokens: int = 128,
) -> None:
    models = load_model(target, dtype="float32"), load_model(medium, dtype=medium_dtype)
    plans = [make_plan(name, Drafting(), Cut("score", log_s=-2.5)) for name in schedule]
    sampled = Chooser.make(temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=1)
    verdicts: Counter[str] = Counter()
    for done, prompt in enumerate(read_prompts(prompts, limit)):
        ids = Conversation(prompt, models[0].tokenizer).ids(0)
        checks: list[tuple[str, list[int], Chooser | None]] = [
            ("greedy", generate(models[0], ids, max_new_tokens)[0], None)
        ]
        if done < sampled_limit:
            own = decode(*models, ids, AUTOREGRESSIVE, max_new_tokens, sampled).tokens
            checks.append(("sampled", own, sampled))
        for plan in plans:
            for kind, reference, chooser in checks:
                ours = decode(*models, ids, plan, max_new_tokens, chooser).tokens
                verdict = compare_texts(models[0], ids, ours, reference, chooser)
                verdicts[f"{kind} {verdict}"] += 1
                if verdict != "equal":
                    print(f"{prompt.file}/{prompt.id} {plan.name} {kind}: {verdict}", flush=True)
    print(dict(verdicts))


if __name__ == "__main__":
    typer.run(main)
