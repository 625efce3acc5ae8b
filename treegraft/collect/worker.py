"""One prompt: decode it fully while forking every decision, and keep what was seen (spec section 5)."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
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
from treegraft.runtime.models import Model, check_pair, load_model
from treegraft.runtime.ngram import NGramDrafter
from treegraft.runtime.sampling import Chooser, ScoreError
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


@dataclass(frozen=True)
class Settings:
    """How prompts are collected; raises ValueError for what cannot be collected with."""

    drafting: Drafting
    sampling: Sampling
    max_new_tokens: int
    positions: Positions = Positions()  # noqa: RUF009

    def __post_init__(self) -> None:
        if self.drafting.depth < 1:
            raise ValueError("--depth 0 leaves no decision to log; give at least 1")
        self.sampling.chooser()  # a value out of range is an error here and not every prompt's
        if self.sampling.seed is None:
            raise ValueError("seed is None; a log is made with a seed that it names: give a whole number")


@dataclass(frozen=True)
class Outcome:
    """What became of a prompt: its part (tokens of prompt and answer turn by turn, and the tables), or an error."""

    prompt: Prompt
    lengths: list[tuple[int, int]]
    tables: log.Tables
    error: str | None = None


@dataclass(frozen=True)
class Worker:
    """A pair of models and how prompts are collected with them; by itself the engine of one process."""

    target: Model
    medium: Model
    how: Settings

    @classmethod
    def load(
        cls, target: str, medium: str, device: str, dtype: str, medium_dtype: str | None, how: Settings
    ) -> "Worker":
        """Load the models; raises ValueError where they do not go together."""
        models = load_model(target, device, dtype), load_model(medium, device, medium_dtype or dtype)
        check_pair(*models)
        return cls(*models, how)

    @property
    def settings(self) -> dict[str, Any]:
        """What a log's manifest says of models and settings."""
        return {
            "version": log.VERSION,
            "models": {
                role: {"name": model.name, "fingerprint": model.fingerprint, "dtype": str(model.lm.dtype)}
                for role, model in (("target", self.target), ("medium", self.medium))
            },
            "small": {"kind": "n-gram", "longest": NGramDrafter.longest, "calibration": NGramDrafter().calibration},
            "drafting": self.how.drafting.as_dict(),
            "sampling": asdict(self.how.sampling),
            "max_new_tokens": self.how.max_new_tokens,
            "positions": str(self.how.positions),
            "signals": signals.LOGGED,
            "versions": {
                "treegraft": treegraft.__version__, "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }  # fmt: skip

    def collect(self, prompt: Prompt) -> Outcome:
        """One prompt's part; an error of whatever kind is the prompt's own."""
        try:
            decisions, leaves, lengths = collect_prompt(self.target, self.medium, prompt, self.how)
            return Outcome(prompt, lengths, log.encode(decisions, leaves))
        except Exception as error:
            return Outcome(prompt, [], {}, _describe(error))

    def run(self, prompts: Iterable[Prompt]) -> Iterator[Outcome]:
        """Prompt after prompt."""
        return map(self.collect, prompts)


def _describe(error: Exception) -> str:
    expected = isinstance(error, PromptError | ContextError | ScoreError)
    return str(error) if expected else f"{type(error).__name__}: {' '.join(str(error).split())}"


def collect_prompt(
    target: Model, medium: Model, prompt: Prompt, how: Settings
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[tuple[int, int]]]:
    """The rows of both tables for one prompt, and the tokens of prompt and answer, turn by turn."""
    # Any schedule gives the same text; this one is fast wherever forwards are dear.
    plan = Plan("collect", Mask(0), how.drafting, Cut("score", log_s=-2.5))
    conversation = Conversation(prompt, target.tokenizer)
    decisions: list[dict[str, Any]] = []
    leaves: list[dict[str, Any]] = []
    lengths: list[tuple[int, int]] = []
    for turn in range(conversation.turns):
        ids = conversation.ids(turn)
        decoded = decode(target, medium, ids, plan, how.max_new_tokens, how.sampling.chooser(), measure=True)
        keys = {"file": prompt.file, "prompt": prompt.id, "turn": turn}
        chosen = how.positions.chosen(f"{prompt.sha256()} {turn}", len(decoded.tokens) - 1)
        _collect_answer(medium, target.embeds, ids, decoded.tokens, decoded.uncertainty, chosen, how.drafting, keys,
                        decisions, leaves)  # fmt: skip
        lengths.append((len(ids), len(decoded.tokens)))
        conversation.answer(decoded.tokens)
    return decisions, leaves, lengths


def blocks(positions: list[int], span: int | None) -> Iterator[list[int]]:
    """Runs of at most BLOCK of `positions`, the last of a run at most `span` after its first (None: however far)."""
    block: list[int] = []
    for position in positions:
        if block and (len(block) == BLOCK or (span is not None and position - block[0] > span)):
            yield block
            block = []
        block.append(position)
    if block:
        yield block


def _collect_answer(
    medium: Model,
    embeds: int,
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
    drafter = LMDrafter(medium, embeds)
    smalls = [NGramDrafter() for _ in range(min(BLOCK, len(chosen)))]
    deepest = drafter.forward.deepest
    text = prompt + answer

    def state(place: Place, fork: Fork, step: int, planned: int) -> signals.State:
        entropy, margin = uncertainty[place.position]
        return signals.State(
            fork.tree, drafting.width, step, fork.mask, len(prompt), place.position, entropy, margin,
            match=lambda node: place.small.match(paths, fork.tree.path[node]), planned=lambda: planned,
        )  # fmt: skip

    for block in blocks(chosen, None if deepest is None else deepest - drafting.depth):
        begin = time.perf_counter()
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
