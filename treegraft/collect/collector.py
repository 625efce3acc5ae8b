"""Decode prompts fully while forking every decision, and log what was seen (spec section 5)."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import treegraft
from treegraft.collect.fork import Fork, fork_position, leaf_facts
from treegraft.data import log
from treegraft.data.prompts import Conversation, Prompt, PromptError
from treegraft.runtime import signals
from treegraft.runtime.decode import ContextError, Plan, decode
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.medium import LMDrafter
from treegraft.runtime.models import Model
from treegraft.runtime.ngram import NGramDrafter
from treegraft.runtime.sampling import Chooser
from treegraft.runtime.scheduler import Mask
from treegraft.runtime.size import Cut
from treegraft.runtime.tree import Paths


@dataclass(frozen=True)
class Sampling:
    """How answers were chosen; recorded in the log. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def chooser(self) -> Chooser:
        return Chooser.make(**asdict(self))


def collect(
    target: Model,
    medium: Model,
    prompts: list[Prompt],
    folder: Path,
    drafting: Drafting,
    sampling: Sampling,
    max_new_tokens: int,
    progress: Callable[[int, int, int], None] = lambda done, total, positions: None,
) -> dict[str, Any]:
    """Collect `prompts` into `folder`, going on after the prompts that it already holds; returns the manifest.

    A prompt that is empty or too long is reported in `failed` and does not stop the others. Raises LogError where the
    folder's log was made with other models or settings. `progress` gets finished prompts, all prompts and positions.
    """
    if drafting.depth < 1:
        raise ValueError("--depth 0 leaves no decision to log; give at least 1")
    manifest = _open(folder, _settings(target, medium, drafting, sampling, max_new_tokens))
    # A part whose files are gone is collected again, under a number of its own.
    whole = [p for p in manifest["parts"] if all((folder / p[t]["file"]).exists() for t in ("decisions", "leaves"))]
    number = 1 + max((part["number"] for part in manifest["parts"]), default=-1)
    manifest["parts"] = whole
    finished = {(part["file"], part["prompt"]): part["sha256"] for part in manifest["parts"]}
    positions = 0
    for done, prompt in enumerate(prompts):
        progress(done, len(prompts), positions)
        if known := finished.get((prompt.file, prompt.id)):
            if known != prompt.sha256():
                raise log.LogError(
                    f"{folder} holds another prompt {prompt.file}/{prompt.id} than the one given: the file was edited, "
                    "or two files share a name; collect into another --out"
                )
            continue
        try:
            decisions, leaves, lengths = collect_prompt(target, medium, prompt, drafting, sampling, max_new_tokens)
        except (PromptError, ContextError) as error:
            _forget_failure(manifest, prompt)
            manifest["failed"].append({"file": prompt.file, "prompt": prompt.id, "error": str(error)})
            log.write_manifest(folder, manifest)
            continue
        _forget_failure(manifest, prompt)
        part = log.write_part(folder, number, decisions, leaves)
        keys = {
            "number": number,
            "file": prompt.file,
            "prompt": prompt.id,
            "sha256": prompt.sha256(),
            "lengths": lengths,
        }
        manifest["parts"].append({**keys, **part})
        number += 1
        log.write_manifest(folder, manifest)
        positions += len(leaves) >> drafting.depth
    progress(len(prompts), len(prompts), positions)
    return manifest


def _forget_failure(manifest: dict[str, Any], prompt: Prompt) -> None:
    manifest["failed"] = [f for f in manifest["failed"] if (f["file"], f["prompt"]) != (prompt.file, prompt.id)]


def collect_prompt(
    target: Model, medium: Model, prompt: Prompt, drafting: Drafting, sampling: Sampling, max_new_tokens: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[tuple[int, int]]]:
    """The rows of both tables for one prompt, and the tokens of prompt and answer, turn by turn."""
    # Any schedule gives the same text; this one is fast wherever forwards are dear.
    plan = Plan("collect", Mask(0), drafting, Cut("score", log_s=-2.5))
    conversation = Conversation(prompt, target.tokenizer)
    decisions: list[dict[str, Any]] = []
    leaves: list[dict[str, Any]] = []
    lengths: list[tuple[int, int]] = []
    for turn in range(conversation.turns):
        ids = conversation.ids(turn)
        decoded = decode(target, medium, ids, plan, max_new_tokens, sampling.chooser(), measure=True)
        keys = {"file": prompt.file, "prompt": prompt.id, "turn": turn}
        _collect_answer(medium, ids, decoded.tokens, decoded.uncertainty, drafting, keys, decisions, leaves)
        lengths.append((len(ids), len(decoded.tokens)))
        conversation.answer(decoded.tokens)
    return decisions, leaves, lengths


def _collect_answer(
    medium: Model,
    prompt: list[int],
    answer: list[int],
    uncertainty: list[tuple[float, float]],
    drafting: Drafting,
    keys: dict[str, Any],
    decisions: list[dict[str, Any]],
    leaves: list[dict[str, Any]],
) -> None:
    small, drafter = NGramDrafter(), LMDrafter(medium)
    small.extend(prompt)
    for position, root in enumerate(answer[:-1]):
        start = time.perf_counter()
        small.extend([root])
        committed = prompt + answer[:position]
        paths = Paths(root, committed, small.longest)
        entropy, margin = uncertainty[position]

        def state(fork: Fork, step: int, planned: int, paths=paths, position=position, entropy=entropy, margin=margin):
            return signals.State(
                fork.tree, drafting.width, step, fork.mask, len(prompt), position, entropy, margin,
                match=lambda node: small.match(paths, fork.tree.path[node]), planned=lambda: planned,
            )  # fmt: skip

        rows, forks = fork_position(paths, committed, small, drafter, drafting, state)
        here = {**keys, "position": position}
        lengths = {"prompt_length": len(prompt), "answer_length": len(answer)}
        for fork in forks:
            facts = leaf_facts(fork.tree, fork.tokens, answer[position + 1 :], drafting.budget)
            leaves.append({**here, **lengths, "mask": fork.mask, **facts})
        drafter.commit([0])
        ms = (time.perf_counter() - start) * 1e3
        decisions += [{**here, "token": root, **row, "position_ms": ms} for row in rows]


def _settings(
    target: Model, medium: Model, drafting: Drafting, sampling: Sampling, max_new_tokens: int
) -> dict[str, Any]:
    return {
        "version": log.VERSION,
        "models": {
            role: {"name": model.name, "fingerprint": model.fingerprint, "dtype": str(model.lm.dtype)}
            for role, model in (("target", target), ("medium", medium))
        },
        "small": {"kind": "n-gram", "longest": NGramDrafter.longest, "calibration": NGramDrafter().calibration},
        "drafting": drafting.as_dict(),
        "sampling": asdict(sampling),
        "max_new_tokens": max_new_tokens,
        "signals": signals.LOGGED,
        "versions": {
            "treegraft": treegraft.__version__, "torch": torch.__version__, "transformers": transformers.__version__
        },
    }  # fmt: skip


def _open(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The folder's manifest, new or one made with the same settings."""
    if not (folder / log.MANIFEST).exists():
        folder.mkdir(parents=True, exist_ok=True)
        manifest = {**settings, "parts": [], "failed": []}
        log.write_manifest(folder, manifest)
        return manifest
    manifest = log.read_manifest(folder)
    for name, value in settings.items():
        if name != "versions" and manifest.get(name) != value:
            raise log.LogError(
                f"{folder} was collected with {name} = {manifest.get(name)}, not {value}; "
                "use the same settings to go on, or another --out"
            )
    return manifest
