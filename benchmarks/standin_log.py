"""Collect two logs of the same prompts: with the default drafters, and with a stand-in for a strong medium drafter.

    python benchmarks/standin_log.py --out runs/logs --limit 20 PROMPTS.jsonl...

The stand-in is the target itself with its layers' weights rounded to the nearest of 13 symmetric levels, which 4 bits
hold, in groups of 64 weights; embeddings and output head stay as they are. (With all 15 that 4 bits hold it agrees with
75 % of the default target's tokens, more than a drafter to learn about should.) Its calls cost as much as the target's,
so price its log with `--what-if`. It is saved to OUT/standin; the logs are OUT/default and OUT/strong; an interrupted
run goes on.
"""

import copy
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from treegraft.bench import generate
from treegraft.collect.collector import Sampling, collect
from treegraft.data.prompts import Conversation, Prompt, read_prompts
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.models import DEFAULT_MEDIUM, DEFAULT_TARGET, Model, check_pair, load_model

GROUP = 64  # weights that share a scale, along a row
LEVELS = 6  # on either side of zero
AGREEMENT = 0.60, 0.72  # of the stand-in's first choice with the target's greedy text
JUDGED = 4  # prompts of each file that the agreement is measured on


def main(
    prompts: list[Path],
    out: Annotated[Path, typer.Option()],
    limit: int = 20,
    max_new_tokens: int = 128,
    medium_dtype: str = "bfloat16",
) -> None:
    target = load_model(DEFAULT_TARGET, dtype="float32")
    if not (out / "standin" / "config.json").exists():
        save_standin(target, out / "standin")
    standin = load_model(str(out / "standin"), dtype=medium_dtype)
    check_pair(target, standin)
    first, four, tokens = agreement(target, standin, read_prompts(prompts, JUDGED), max_new_tokens)
    print(f"stand-in: top-1 agreement {first:.3f}, top-4 {four:.3f}, over {tokens} tokens", flush=True)
    if not AGREEMENT[0] <= first <= AGREEMENT[1]:
        raise SystemExit(f"the stand-in's top-1 agreement {first:.3f} is outside {AGREEMENT[0]} .. {AGREEMENT[1]}")
    wanted = read_prompts(prompts, limit)
    for name, medium in (("default", load_model(DEFAULT_MEDIUM, dtype=medium_dtype)), ("strong", standin)):

        def said(done: int, total: int, name: str = name) -> None:
            print(f"{name}: {done} of {total} prompts", flush=True)

        collect(target, medium, wanted, out / name, Drafting(), Sampling(), max_new_tokens, progress=said)


def round_to_4_bits(weight: torch.Tensor) -> torch.Tensor:
    """A matrix (rows, columns) with every GROUP of a row rounded to multiples of its greatest magnitude / LEVELS."""
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    scale = groups.abs().amax(dim=2, keepdim=True).clamp_min(1e-12) / LEVELS
    return ((groups / scale).round().clamp(-LEVELS, LEVELS) * scale).reshape(weight.shape)


def save_standin(target: Model, folder: Path) -> None:
    """Write the target with every linear map of its layers rounded, as a folder that `load_model` reads."""
    lm: Any = copy.deepcopy(target.lm)
    for module in lm.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = round_to_4_bits(module.weight.data)
    lm.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)


def agreement(target: Model, drafter: Model, prompts: list[Prompt], max_new_tokens: int) -> tuple[float, float, int]:
    """Shares of the tokens of the target's greedy answers that are the drafter's first, or among its first four."""
    hits = []
    for prompt in prompts:
        ids = Conversation(prompt, target.tokenizer).ids(0)
        answer, *_ = generate(target, ids, max_new_tokens)
        context = torch.tensor([ids + answer[:-1]], device=drafter.device)
        with torch.inference_mode():
            choices = drafter.lm(context, logits_to_keep=len(answer)).logits[0].topk(4).indices  # type: ignore[operator]
        hits.append(choices == torch.tensor(answer, device=drafter.device)[:, None])
    hit = torch.cat(hits)
    return hit[:, 0].float().mean().item(), hit.any(dim=1).float().mean().item(), len(hit)


if __name__ == "__main__":
    typer.run(main)
