"""Decode prompts fully while forking every decision, and log what was seen (spec section 5)."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import treegraft
from treegraft.collect.fork import Fork, Place, fork_places, leaf_facts
from treegraft.collect.positions import Positions
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
from treegraft.runtime.tree import DraftTree, Paths

BLOCK = 16  # positions that share medium forwards


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
    positions: Positions = Positions(),  # noqa: B008
    retry_failed: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Collect `prompts` into `folder`, going on after those that it holds; returns the manifest and what failed.

    A prompt that fails, for whatever reason, goes to failed.jsonl and harms no other; `retry_failed` tries those of the
    log again. `progress` gets finished prompts and all prompts; `stop` is asked before each prompt.
    Raises LogError where the log was made with other models or settings, was damaged, or cannot be written, and
    ValueError for a `drafting` or `sampling` that cannot be collected with.
    """
    if drafting.depth < 1:
        raise ValueError("--depth 0 leaves no decision to log; give at least 1")
    sampling.chooser()  # a value out of range is an error here and not every prompt's
    folder.mkdir(parents=True, exist_ok=True)
    with log.locked(folder):
        asked = {(prompt.file, prompt.id) for prompt in prompts}
        manifest = _open(folder, _settings(target, medium, drafting, sampling, max_new_tokens, positions), asked)
        held = {(p["file"], p["prompt"]): p["sha256"] for p in manifest["parts"]}
        _check_held(folder, prompts, held)
        noted = log.read_failed(folder)
        failed = {key: line for line in noted if (key := (line["file"], line["prompt"])) not in held}
        if len(failed) < len(noted):  # the collector was killed before it could strike one out
            log.write_failed(folder, failed.values())
        if retry_failed:
            for prompt in prompts:
                failed.pop((prompt.file, prompt.id), None)
        for done, prompt in enumerate(prompts):
            progress(done, len(prompts))
            key, sha256 = (prompt.file, prompt.id), prompt.sha256()
            if key in held or (key in failed and failed[key]["sha256"] == sha256):
                continue
            if stop():
                return manifest, list(failed.values())
            keys = {"file": prompt.file, "prompt": prompt.id, "sha256": sha256}
            try:
                *rows, lengths = collect_prompt(target, medium, prompt, drafting, sampling, max_new_tokens, positions)
                tables = log.as_tables(*rows)
                failed.pop(key, None)
            except Exception as error:
                failed[key] = {**keys, "error": _describe(error)}
            try:
                if key not in failed:
                    number = 1 + max((part["number"] for part in manifest["parts"]), default=-1)
                    part = log.write_part(folder, number, tables)
                    manifest["parts"].append({"number": number, **keys, "lengths": lengths, **part})
                    log.write_manifest(folder, manifest)
                log.write_failed(folder, failed.values())
            except OSError as error:
                _write_error(folder, {**failed, key: {**keys, "error": _describe(error)}})
                raise log.LogError(
                    f"{folder}: {prompt.file}/{prompt.id} could not be written ({error}); the earlier prompts are "
                    "safe: make room, then the same command with --retry-failed goes on"
                ) from error
        progress(len(prompts), len(prompts))
    return manifest, list(failed.values())


def _write_error(folder: Path, failed: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Note a prompt that could not be written, in the room that deleting its files leaves."""
    log.tidy(folder, log.read_manifest(folder))
    with suppress(OSError):  # without the note the prompt is tried again all the same
        log.write_failed(folder, failed.values())


def _describe(error: Exception) -> str:
    expected = isinstance(error, PromptError | ContextError)
    return str(error) if expected else f"{type(error).__name__}: {' '.join(str(error).split())}"


def _check_held(folder: Path, prompts: list[Prompt], held: dict[tuple[str, str], str]) -> None:
    """Raise LogError where a prompt that the log holds is asked for with another text."""
    for prompt in prompts:
        if held.get((prompt.file, prompt.id), prompt.sha256()) != prompt.sha256():
            raise log.LogError(
                f"{folder} holds another prompt {prompt.file}/{prompt.id} than the one given: the file was edited, "
                "or two files share a name; collect into another --out"
            )


def collect_prompt(
    target: Model,
    medium: Model,
    prompt: Prompt,
    drafting: Drafting,
    sampling: Sampling,
    max_new_tokens: int,
    positions: Positions,
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
        chosen = positions.chosen(f"{prompt.sha256()} {turn}", len(decoded.tokens) - 1)
        _collect_answer(medium, ids, decoded.tokens, decoded.uncertainty, chosen, drafting, keys, decisions, leaves)
        lengths.append((len(ids), len(decoded.tokens)))
        conversation.answer(decoded.tokens)
    return decisions, leaves, lengths


def _collect_answer(
    medium: Model,
    prompt: list[int],
    answer: list[int],
    uncertainty: list[tuple[float, float]],
    chosen: list[int],
    drafting: Drafting,
    keys: dict[str, Any],
    decisions: list[dict[str, Any]],
    leaves: list[dict[str, Any]],
) -> None:
    """Append the rows of the `chosen` positions."""
    drafter = LMDrafter(medium)
    smalls = [NGramDrafter() for _ in range(min(BLOCK, len(chosen)))]
    text = prompt + answer

    def state(place: Place, fork: Fork, step: int, planned: int) -> signals.State:
        entropy, margin = uncertainty[place.position]
        return signals.State(
            fork.tree, drafting.width, step, fork.mask, len(prompt), place.position, entropy, margin,
            match=lambda node: place.small.match(paths, fork.tree.path[node]), planned=lambda: planned,
        )  # fmt: skip

    for start in range(0, len(chosen), BLOCK):
        begin = time.perf_counter()
        block = chosen[start : start + BLOCK]
        committed = prompt + answer[: block[0]]
        paths = Paths(answer[block[0]], committed, NGramDrafter.longest)
        known = [0]  # the path of the known text
        for token in answer[block[0] + 1 : block[-1] + 1]:
            known.append(paths.child(known[-1], token))
        places = []
        for position, small in zip(block, smalls):
            small.extend(text[len(small.committed) : len(prompt) + position + 1])
            root = known[position - block[0]]
            places.append(Place(position, root, small, [Fork(0, DraftTree(path=[root], token=[answer[position]]))]))
        fork_places(places, paths, committed, drafter, drafting, state)
        drafter.commit(known)
        lengths = {"prompt_length": len(prompt), "answer_length": len(answer)}
        for place in places:
            here = {**keys, "position": place.position}
            for fork in place.forks:
                facts = leaf_facts(fork.tree, fork.tokens, answer[place.position + 1 :], drafting.budget)
                leaves.append({**here, **lengths, "mask": fork.mask, **facts})
        ms = (time.perf_counter() - begin) * 1e3 / len(block)
        for place in places:
            here = {**keys, "position": place.position, "token": answer[place.position]}
            decisions += [{**here, **row, "position_ms": ms} for row in place.decisions]


def _settings(
    target: Model, medium: Model, drafting: Drafting, sampling: Sampling, max_new_tokens: int, positions: Positions
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
        "positions": str(positions),
        "signals": signals.LOGGED,
        "versions": {
            "treegraft": treegraft.__version__, "torch": torch.__version__, "transformers": transformers.__version__
        },
    }  # fmt: skip


def _open(folder: Path, settings: dict[str, Any], asked: set[tuple[str, str]]) -> dict[str, Any]:
    """The folder's manifest, new or one made with the same settings, its parts checked.

    A part with a file gone is dropped if its prompt is among those `asked` for, and so collected again.
    """
    if not (folder / log.MANIFEST).exists():
        if parts := [path.name for table in log.TABLES for path in folder.glob(f"{table}-*.parquet")]:
            raise log.LogError(f"{folder}: holds {parts[0]} but no {log.MANIFEST}; use another --out")
        manifest = {**settings, "parts": []}
        log.write_manifest(folder, manifest)
        return manifest
    manifest = log.read_manifest(folder)
    there, here = (_flat({k: s.get(k) for k in settings if k != "versions"}) for s in (manifest, settings))
    if different := [name for name in there | here if there.get(name) != here.get(name)]:
        told = ", ".join(f"{name} = {there.get(name)}, not {here.get(name)}" for name in different[:3])
        raise log.LogError(
            f"{folder} was collected with {told}; use the same models and settings to go on, or another --out"
        )
    whole = [
        p for p in manifest["parts"]
        if (p["file"], p["prompt"]) not in asked or all((folder / p[t]["file"]).exists() for t in log.TABLES)
    ]  # fmt: skip
    for part in whole:
        log.check_part(folder, part)
    named = {part["leaves"]["file"] for part in manifest["parts"]}
    unnamed = sorted(path.name for path in folder.glob("leaves-*.parquet") if path.name not in named)
    if len(unnamed) > 1:  # a killed collector leaves one at most
        raise log.LogError(
            f"{folder}: its {log.MANIFEST} is older than its parts ({', '.join(unnamed[:3])} are not named); put the "
            "newer one back, or delete those parts"
        )
    log.tidy(folder, {"parts": whole})
    if whole != manifest["parts"]:
        manifest["parts"] = whole
        log.write_manifest(folder, manifest)
    return manifest


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
