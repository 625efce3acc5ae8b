"""How well a drafter predicts its target's greedy text, and what a call of it costs.

    python tools/measure_drafter.py --answers answers.json PROMPTS.jsonl...

Prompt files hold one JSON object a line, whose `turns` are the user's messages; the first is asked. Agreement is
teacher-forced: at each position of the target's own answer, is its token the drafter's first, or among its first four?
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
from transformers import DynamicCache

from treegraft.runtime.models import Model, check_pair, load_model

ANSWER = 128  # tokens of the answer that count
CONTEXT = 256  # tokens in the cache when a call is timed


def prompt_ids(target: Model, message: str) -> list[int]:
    text = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
    )
    return target.tokenizer(text, add_special_tokens=False).input_ids


def greedy_answer(target: Model, ids: list[int]) -> list[int]:
    prompt = torch.tensor([ids], device=target.device)
    out = target.lm.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=ANSWER, do_sample=False)
    return out[0, len(ids) :].tolist()


def agreement(drafter: Model, prompt: list[int], answer: list[int]) -> tuple[float, float]:
    """Shares of the answer's tokens that are the drafter's first choice, and among its first four."""
    ids = torch.tensor([prompt + answer[:-1]], device=drafter.device)
    with torch.inference_mode():
        choices = drafter.lm(ids, logits_to_keep=len(answer)).logits[0].topk(4).indices
    if drafter.draft_vocabulary is not None:
        choices = drafter.draft_vocabulary[choices]
    hit = choices == torch.tensor(answer, device=drafter.device)[:, None]
    return hit[:, 0].float().mean().item(), hit.any(1).float().mean().item()


def call_time(model: Model, tokens: int) -> float:
    """Milliseconds of one forward of `tokens` tokens behind CONTEXT cached ones."""
    cache = DynamicCache(config=model.lm.config)
    with torch.inference_mode():
        model.lm(torch.full((1, CONTEXT), 100, device=model.device), cache=cache)
        ids = torch.full((1, tokens), 100, device=model.device)
        times = []
        for _ in range(3):
            began = time.perf_counter()
            model.lm(ids, cache=cache).logits.sum().item()
            times.append(1000 * (time.perf_counter() - began))
            cache.crop(-tokens)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, nargs="+")
    parser.add_argument("--target", default="default")
    parser.add_argument("--medium", default="default-medium")
    parser.add_argument("--limit", type=int, help="prompts a file")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--answers", type=Path, required=True, help="where the target's answers are kept (JSON)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target, medium = load_model(args.target, dtype="float32"), load_model(args.medium, dtype="float32")
    check_pair(target, medium)
    known = json.loads(args.answers.read_text()) if args.answers.exists() else {}
    means = []
    for path in args.prompts:
        shares = []
        for line in path.read_text().splitlines()[: args.limit]:
            prompt = prompt_ids(target, json.loads(line)["turns"][0])
            key = f"{target.fingerprint} {' '.join(map(str, prompt))}"
            if key not in known:
                known[key] = greedy_answer(target, prompt)
                args.answers.write_text(json.dumps(known))
            shares.append(agreement(medium, prompt, known[key]))
        means.append([statistics.mean(column) for column in zip(*shares, strict=True)])
        print(f"{path.stem:12} {len(shares):3} answers  top-1 {means[-1][0]:.3f}  top-4 {means[-1][1]:.3f}", flush=True)
    first, four = (statistics.mean(column) for column in zip(*means, strict=True))
    print(f"{'mean':12}              top-1 {first:.3f}  top-4 {four:.3f}")
    for tokens in (1, 4, 16):
        pairs = [(call_time(target, tokens), call_time(medium, tokens)) for _ in range(15)]  # interleaved: load drifts
        ours, theirs = statistics.median(b for _, b in pairs), statistics.median(a for a, _ in pairs)
        ratio = statistics.median(b / a for a, b in pairs)
        print(f"call of {tokens:2} tokens: drafter {ours:.1f} ms, target {theirs:.1f} ms, ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
