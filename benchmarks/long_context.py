"""Long contexts: memory a token, tokens per second and time to first token, against transformers' `generate`.

    python benchmarks/long_context.py --schedule small --schedule 0b00001 [--context 256 ...] [--repeats 2] TEXT.jsonl

The prompt is the file's texts one after another (JSON Lines prompts), cut to the wanted number of tokens. Decoders are
interleaved in a random order. Memory is what the caches hold at the end, both models' together. `--processor-time`
counts the process's own time, for a machine that other work shares.
"""

import random
from pathlib import Path
from statistics import median
from time import process_time
from typing import Annotated, Any

import typer
from transformers import DynamicCache

from treegraft import bench
from treegraft.bench import GENERATE, Rival, generate
from treegraft.data.prompts import Conversation, read_prompts
from treegraft.runtime import decode as decoding
from treegraft.runtime.decode import Plan, PromptCache, decode
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.models import DEFAULT_MEDIUM, DEFAULT_TARGET, check_pair, load_model
from treegraft.runtime.plan import make_plan
from treegraft.runtime.size import Cut


def main(
    prompts: list[Path],
    schedule: Annotated[list[str], typer.Option()] = ["autoregressive", "small"],  # noqa: B006
    context: Annotated[list[int], typer.Option()] = [256, 1024, 4096],  # noqa: B006
    target: str = DEFAULT_TARGET,
    medium: str = DEFAULT_MEDIUM,
    device: str = "cpu",
    dtype: str = "float32",
    medium_dtype: str = "bfloat16",
    max_new_tokens: int = 64,
    repeats: int = 2,
    processor_time: bool = False,
) -> None:
    if processor_time:
        bench.perf_counter = decoding.perf_counter = process_time
    models = load_model(target, device, dtype), load_model(medium, device, medium_dtype)
    check_pair(*models)
    tokenizer = models[0].tokenizer
    words = [token for prompt in read_prompts(prompts) for token in Conversation(prompt, tokenizer).ids(0)]
    plans = [make_plan(name, Drafting(), Cut("score", log_s=-2.5)) for name in schedule]
    ways: list[Plan | Rival] = [GENERATE, *plans]
    order = random.Random(0)
    for plan in plans:
        decode(*models, words[:16], plan, 4)  # warm up
    generate(models[0], words[:16], 4)
    for length in context:
        runs: dict[str, list[tuple[float, float, float]]] = {}
        for _ in range(repeats):
            for way in order.sample(ways, len(ways)):
                runs.setdefault(way.name, []).append(_run(models, words[:length], way, max_new_tokens))
        medians = {name: [median(column) for column in zip(*found)] for name, found in runs.items()}
        theirs = medians[GENERATE.name]
        for name, (first, rate, kib) in medians.items():
            print(
                f"{length} tokens, {name}: first token after {first:.0f} ms ({first / theirs[0]:.3f} of generate's), "
                f"then {rate:.2f} tokens/s ({rate / theirs[1]:.3f}), caches of {kib:.1f} KiB a token",
                flush=True,
            )


def _run(models: Any, ids: list[int], way: Plan | Rival, count: int) -> tuple[float, float, float]:
    """ms to the first token, tokens per second after it, and KiB of cache per token of prompt and answer."""
    held: Any
    if isinstance(way, Rival):
        held = DynamicCache(config=models[0].lm.config)
        tokens, ms, first = generate(models[0], ids, count, Rival(way.name, {"cache": held}))
        layers = held.layers
    else:
        held = PromptCache(*models)
        decoded = decode(models[0], models[1], ids, way, count, cache=held)
        tokens, ms, first = decoded.tokens, decoded.total_ms, decoded.first_token_ms
        layers = [layer for forward in (held.verifier, held.drafter.forward) for layer in forward.cache.layers]
    buffers = [buffer for layer in layers if layer.is_initialized for buffer in (layer.keys, layer.values)]
    size = sum(buffer.numel() * buffer.element_size() for buffer in buffers)
    return first, 1e3 * (len(tokens) - 1) / (ms - first), size / 1024 / (len(ids) + len(tokens))


if __name__ == "__main__":
    typer.run(main)
