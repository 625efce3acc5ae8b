"""Where a round's wall time goes: inside the target's and the medium drafter's forwards, and in what is around them.

    python tools/profile_round.py --schedule small --schedule 0b00101 --limit 1 [PROMPTS.jsonl...]

Without prompt files, the package's own. The prompt's forward is left out. "around" splits as the decoder does; its
"target" and "medium" are then what surrounds the forward itself (mask, acceptance; rescoring, grafting).
`--functions N` lists the N functions of ours that take most time.
"""

import cProfile
import pstats
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer

from treegraft.data.prompts import Conversation, read_prompts, shipped
from treegraft.runtime.decode import Decoded, decode, decode_rounds
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.models import DEFAULT_MEDIUM, DEFAULT_TARGET, Model, check_pair, load_model
from treegraft.runtime.plan import make_plan
from treegraft.runtime.size import Cut


class Stopwatch:
    """Adds up the time inside a model's layers and head (`ms`), its forwards, their tokens and rows of logits."""

    def __init__(self, model: Model):
        self.device = model.device
        self.reset()
        body: Any = model.lm.base_model
        head: Any = model.lm.get_output_embeddings()
        for module, count in ((body, self._count_forward), (head, self._count_rows)):
            module.register_forward_pre_hook(self._start)
            module.register_forward_hook(self._stop)
            module.register_forward_hook(count)
        body.get_input_embeddings().register_forward_hook(self._count_tokens)

    def reset(self) -> None:
        self.forwards = self.tokens = self.rows = 0
        self.ms = 0.0

    def _wait(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return perf_counter()

    def _start(self, *_: Any) -> None:
        self.began = self._wait()

    def _stop(self, *_: Any) -> None:
        self.ms += (self._wait() - self.began) * 1e3

    def _count_forward(self, *_: Any) -> None:
        self.forwards += 1

    def _count_tokens(self, _: Any, inputs: Any, output: torch.Tensor) -> None:
        self.tokens += output.shape[-2]

    def _count_rows(self, _: Any, inputs: Any, output: torch.Tensor) -> None:
        self.rows += output.shape[-2]


def main(
    prompts: Annotated[list[Path] | None, typer.Argument()] = None,
    schedule: Annotated[list[str], typer.Option()] = ["small", "medium"],  # noqa: B006
    target: str = DEFAULT_TARGET,
    medium: str = DEFAULT_MEDIUM,
    device: str = "cpu",
    dtype: str = "float32",
    medium_dtype: str = "bfloat16",
    limit: int = 1,
    max_new_tokens: int = 128,
    functions: int = 0,
) -> None:
    models = load_model(target, device, dtype), load_model(medium, device, medium_dtype)
    check_pair(*models)
    asked = read_prompts(prompts or shipped("bench"), limit)
    texts = [Conversation(prompt, models[0].tokenizer).ids(0) for prompt in asked]
    watches = [Stopwatch(model) for model in models]
    for name in schedule:
        plan = make_plan(name, Drafting(), Cut("score", log_s=-2.5))
        decode(*models, texts[0], plan, 8)  # warm up
        profiler = cProfile.Profile()
        total = dict.fromkeys(("ms", "target", "medium", "forwards", "tokens", "rows", "rounds"), 0.0)
        parts: dict[str, float] = {}
        for ids in texts:
            if functions:
                profiler.enable()
            for decoded in decode_rounds(*models, ids, plan, max_new_tokens):
                if not decoded.rounds:  # the prompt's forward is over
                    for watch in watches:
                        watch.reset()
            profiler.disable()
            _add(total, parts, decoded, watches)
        _print(name, total, parts)
        if functions:
            stats = pstats.Stats(profiler).sort_stats("tottime")
            stats.print_stats("treegraft|tolist|topk|log_softmax|argmax", functions)


def _add(total: dict[str, float], parts: dict[str, float], decoded: Decoded, watches: list[Stopwatch]) -> None:
    for done in decoded.rounds:
        for part, ms in done.ms.items():
            parts[part] = parts.get(part, 0.0) + ms
    total["rounds"] += len(decoded.rounds)
    total["ms"] = sum(parts.values())
    for role, watch in zip(("target", "medium"), watches):
        total[role] += watch.ms
    for count in ("forwards", "tokens", "rows"):
        total[count] += sum(getattr(watch, count) for watch in watches)


def _print(name: str, total: dict[str, float], parts: dict[str, float]) -> None:
    ms, rounds = total["ms"], total["rounds"]
    inside = total["target"] + total["medium"]
    print(
        f"{name}: {rounds:.0f} rounds of {ms / rounds:.1f} ms; inside the forwards {inside / ms:.1%} (target "
        f"{total['target'] / ms:.1%}, medium {total['medium'] / ms:.1%}); a round has {total['forwards'] / rounds:.2f} "
        f"forwards, {total['tokens'] / rounds:.1f} tokens, {total['rows'] / rounds:.1f} rows of logits"
    )
    around = {part: spent - total.get(part, 0.0) for part, spent in parts.items()}
    print("  around: " + ", ".join(f"{part} {spent / ms:.2%}" for part, spent in around.items()), flush=True)


if __name__ == "__main__":
    typer.run(main)
