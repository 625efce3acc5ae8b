"""Synthetic logs, and a tiny pair of models whose log is collected for real."""

from pathlib import Path

import numpy as np
from tiny import config, save_lm, save_noised

from treegraft.data import log
from treegraft.data.log import Answer, node
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.latency import Curve, LatencyProfile
from treegraft.runtime.models import Model, load_model
from treegraft.runtime.signals import LOGGED, SIGNALS

# Everything costs something: tokens, context, lag, steps and rounds.
COSTLY = LatencyProfile(
    Curve((1, 4, 12), (10.0, 12.0, 19.0), 0.01, 0.001), Curve((1, 6), (3.0, 5.0), 0.002, 0.0005), 0.2, 0.4, 0.7,
    medium_first_ms=0.9, decision_ms=0.15, uncertainty_ms=0.6,
)  # fmt: skip


def random_answer(
    generator: np.random.Generator, length: int, depth: int = 3, budget: int = 6, prompt: str = "p", file: str = "f"
) -> Answer:
    """Random but consistent facts: a mask's earlier bits alone settle its earlier steps, ranks ascend, scores fall."""
    positions, masks = max(length - 1, 0), 1 << depth
    log_s = np.full((positions, masks, budget), -np.inf, np.float32)
    ranks = np.full((positions, masks, depth), budget, np.int16)
    q = np.zeros((positions, masks), np.int16)
    tokens = np.zeros((positions, masks, depth), np.int16)
    signals = np.zeros((positions, masks - 1, len(LOGGED)), np.float32)
    for t in range(positions):
        for step in range(1, depth + 1):
            for before in range(1 << (step - 1)):
                same = np.arange(masks) & ((1 << (step - 1)) - 1) == before
                drawn = generator.normal(size=len(LOGGED)).astype(np.float32)
                drawn = np.where(["int" in SIGNALS[name].dtype for name in LOGGED], np.round(3 * np.abs(drawn)), drawn)
                drawn[LOGGED.index("step")], drawn[LOGGED.index("mask")] = step, before
                drawn[LOGGED.index("medium_calls")] = before.bit_count()
                drawn[LOGGED.index("answer_position")] = t
                signals[t, node(step, before)] = drawn
                # A first call has at least the root to process; a later one may find nothing to do.
                count = generator.integers(0 if before else 1, 5)
                tokens[t, same & (np.arange(masks) >> (step - 1) & 1 == 1), step - 1] = count
        for mask in range(masks):
            nodes = int(generator.integers(0, budget + 1))
            log_s[t, mask, :nodes] = -np.sort(generator.exponential(1.0, nodes)).astype(np.float32)
            accepted = int(generator.integers(0, min(nodes, depth, length - 1 - t) + 1))
            ranks[t, mask, :accepted] = np.sort(generator.choice(nodes, accepted, replace=False)) if accepted else 0
            q[t, mask] = generator.integers(0, accepted + 1) if tokens[t, mask].any() else 0
    return Answer(
        file, prompt, 0, int(generator.integers(1, 9)), length, signals, log_s, ranks, q, tokens,
        np.ones((positions, masks), bool), np.arange(positions),
    )  # fmt: skip


def random_log(seed: int, lengths: tuple[int, ...], **shape: int) -> list[Answer]:
    generator = np.random.default_rng(seed)
    return [random_answer(generator, n, prompt=f"p{i}", file=f"f{i % 2}", **shape) for i, n in enumerate(lengths)]


def make_pair(folder: Path, seed: int = 0) -> tuple[Model, Model]:
    """A tiny target, in float64 so that batched and single forwards agree, and a drafter that often agrees with it."""
    settings = config("llama", size=40, hidden=32, layers=2)
    target = load_model(str(save_lm(folder / "target", settings, seed)), dtype="float64")
    return target, load_model(str(save_noised(folder / "medium", target, 0.15, seed + 1)), dtype="float64")


PLANTED = Drafting(depth=2, width=2, children=2, budget=4)
PLANTED_PROFILE = LatencyProfile.what_if(0.6)


def planted_log(seed: int, prompts: int = 12, length: int = 30, informative: bool = True) -> list[Answer]:
    """Answers where a call at step 1 gains two tokens at half of the positions, and nothing else ever pays.

    root_match is 3 there and 1 elsewhere, or random if not `informative`; so are all other signals. The best policy
    calls at step 1 where root_match > 2.
    """
    generator = np.random.default_rng(seed)
    answers = []
    for index in range(prompts):
        answer = random_answer(generator, length, depth=2, budget=4, prompt=f"p{index}", file=f"f{index % 2}")
        called = np.arange(4) & 1 == 1
        for t in range(length - 1):
            pays = bool(generator.integers(2))
            accepted = min(2, length - 1 - t) if pays else 0
            answer.log_s[t] = -np.inf
            answer.log_s[t, called, :2] = -0.1, -0.2
            answer.ranks[t], answer.q[t], answer.tokens[t] = 4, 0, 0
            answer.ranks[t, called, :accepted] = np.arange(accepted)
            answer.q[t, called] = accepted
            answer.tokens[t, called, 0] = answer.tokens[t, 2:, 1] = 1
            match = 3 if (pays if informative else generator.integers(2)) else 1
            answer.signals[t, :, LOGGED.index("root_match")] = match
        answers.append(answer)
    return answers


def write_log(folder: Path, answers: list[Answer], drafting: Drafting) -> Path:
    """Write answers as a log, without what its limit of medium calls rules out."""
    folder.mkdir(parents=True)
    manifest = {
        "version": log.VERSION, "drafting": drafting.as_dict(), "positions": "every:1", "signals": LOGGED, "parts": [],
        "models": {role: {"name": role, "fingerprint": f"{role}-print", "dtype": "torch.float32"}
                   for role in ("target", "medium")},
    }  # fmt: skip
    for number, answer in enumerate(answers):
        keys = {"file": answer.file, "prompt": answer.prompt, "turn": answer.turn}
        decisions, leaves = [], []
        for t in range(len(answer.positions)):
            here = {**keys, "position": t}
            for step in range(1, drafting.depth + 1):
                for mask in np.flatnonzero(answer.possible[t, : 1 << (step - 1)]).tolist():
                    values = answer.signals[t, node(step, mask)]
                    row = {n: int(v) if "int" in SIGNALS[n].dtype else v for n, v in zip(LOGGED, values.tolist())}
                    decisions.append({**here, "token": 0, **row, "position_ms": 0.0})
            for mask in np.flatnonzero(answer.possible[t]).tolist():
                nodes = answer.log_s[t, mask]
                leaves.append({
                    **here, "prompt_length": answer.prompt_length, "answer_length": answer.length, "mask": mask,
                    "log_s": nodes[nodes > -np.inf],
                    "accepted": [rank for rank in answer.ranks[t, mask] if rank < drafting.budget],
                    "q": answer.q[t, mask], "tokens": answer.tokens[t, mask],
                })  # fmt: skip
        part = log.write_part(folder, number, log.encode(decisions, leaves))
        keys = {"file": answer.file, "prompt": answer.prompt, "lengths": [(answer.prompt_length, answer.length)]}
        manifest["parts"].append({**keys, **part})
    log.write_manifest(folder, manifest)
    return folder
