"""TreeGraft inside transformers: `model.generate(**inputs, custom_generate=treegraft.generate, medium=...)`.

transformers prepares the inputs, the logits processors and the stopping criteria as for its own methods, then calls
`generate` for the decoding loop.
"""

import inspect
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_stack
from typing import Any, cast

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin, GenerationMode

from treegraft.runtime.decode import Decoded, Plan, decode_rounds
from treegraft.runtime.models import Model, ModelError, check_pair, fingerprint_of, wrap_model
from treegraft.runtime.monitor import Monitor, watch_drift
from treegraft.runtime.plan import as_plan, check_medium, check_models
from treegraft.runtime.sampling import Chooser, make_seed
from treegraft.runtime.scheduler import Artifact

_OUTPUTS = ("output_attentions", "output_hidden_states")


@dataclass
class TreeGraftOutput(GenerateDecoderOnlyOutput):
    """What `return_dict_in_generate` returns: transformers' own output, and what the rounds did."""

    decoded: Decoded | None = None


def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    medium: Model | PreTrainedModel | None = None,
    schedule: str | Path | Plan = "small",
    seed: int | None = None,
    monitor: bool = True,
    stop_strings: str | list[str] | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | TreeGraftOutput:
    """The decoding loop for `model.generate(..., custom_generate=treegraft.generate)`; not to be called by hand.

    A caller adds four arguments to those of `model.generate`. `medium`: the medium drafter, from `treegraft.load_model`
    or transformers, with the model's own vocabulary. `schedule`: small, medium, a mask such as 0b00101, the path of an
    artifact, or a Plan. `seed`: of the sampling noise; by default drawn from torch's generator, so that
    `torch.manual_seed` decides. `monitor`: draft less where drafting makes the text slower than one-token steps.

    Returns what `generate` would: token ids (1, length), prompt included, or, with `return_dict_in_generate`, a
    TreeGraftOutput. Greedy ids are transformers' own; sampled ones have its distribution. Raises ValueError, by name,
    for what cannot be honoured, ContextError where prompt, answer and draft do not fit the model's context, ScoreError
    where the model's scores for a token are no numbers, ScheduleError and ModelError for a schedule or a drafter that
    cannot serve.
    """
    asked = _asked_of_transformers()
    _refuse(input_ids, generation_config, model_kwargs, asked)
    if isinstance(medium, str):
        raise ModelError(f"medium is the name {medium!r}; give the model itself, from treegraft.load_model({medium!r})")
    if medium is not None and not isinstance(medium, Model | PreTrainedModel):
        raise ModelError(
            f"medium is a {type(medium).__name__}; give a transformers model (a PEFT model's get_base_model()) or "
            "one from treegraft.load_model"
        )
    if "prepare_inputs_for_generation" in vars(model):
        raise ModelError(
            f"model {type(model).__name__} prepares its inputs in a way of its own, as prompt tuning does; "
            "treegraft.generate cannot honour that: leave out custom_generate"
        )
    target = wrap_model(model)
    drafter = wrap_model(medium) if isinstance(medium, PreTrainedModel) else medium
    plan = as_plan(schedule)
    check_medium(plan, drafter is not None)
    if not isinstance(schedule, Plan) and isinstance(plan.schedule, Artifact):
        for wrapped in (target, drafter):
            if wrapped is not None:
                wrapped.fingerprint = wrapped.fingerprint or fingerprint_of(wrapped.lm)
        check_models(plan, target, drafter)
    if drafter is not None:
        check_pair(target, drafter)
    if stop_strings is not None:
        stopping_criteria.append(_stop_strings(stop_strings, asked))

    config = generation_config
    recording = config.return_dict_in_generate and (config.output_scores or config.output_logits)
    record: list[tuple[torch.Tensor, torch.Tensor]] | None = [] if recording else None
    chooser = Chooser(logits_processor, make_seed(seed) if config.do_sample else None, record, input_ids.device)
    prompt = input_ids[0].tolist()
    length = stopping_criteria.max_length or config.max_length

    def scores() -> tuple[torch.Tensor, ...] | None:
        return tuple(row for _, row in record or []) if recording and config.output_scores else None

    # transformers' own criteria go where they are asked; on the host, no answer of theirs waits for the device.
    foreign = any(not type(one).__module__.startswith("transformers.") for one in stopping_criteria)
    asked_on = input_ids.device if foreign else torch.device("cpu")

    def ends(text: list[int]) -> bool:
        return bool(stopping_criteria(torch.tensor([text], device=asked_on), cast(Any, scores())).all())

    rounds = decode_rounds(
        target,
        drafter,
        prompt,
        plan,
        length - len(prompt),
        chooser,
        ends=ends,
        steer=Monitor(plan) if monitor else None,
    )
    shown = 0  # tokens that the streamer has
    for decoded in rounds:
        if asked.streamer is not None:
            for token in decoded.tokens[shown:]:
                asked.streamer.put(torch.tensor([token]))
        shown = len(decoded.tokens)
    if asked.streamer is not None:
        asked.streamer.end()
    watch_drift(decoded, plan, len(prompt))
    sequences = torch.cat([input_ids, torch.tensor([decoded.tokens], device=input_ids.device)], dim=-1)
    if not config.return_dict_in_generate:
        return sequences
    logits = tuple(row for row, _ in record or []) if recording and config.output_logits else None
    return TreeGraftOutput(
        sequences=cast(Any, sequences), scores=cast(Any, scores()), logits=cast(Any, logits), decoded=decoded
    )


@dataclass
class _Asked:
    """Arguments of `model.generate` that transformers keeps from a custom_generate callable."""

    streamer: Any = None
    assistant_model: Any = None
    synced_gpus: Any = None
    tokenizer: Any = None


def _asked_of_transformers() -> _Asked:
    """Read them off the frames of `model.generate`, since a streamer that nobody feeds leaves its reader waiting."""
    asked = _Asked()
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frames = (frame for frame, _ in walk_stack(None))
    for frame in frames:
        if frame.f_code is code:
            asked = _Asked(*(frame.f_locals[name] for name in ("streamer", "assistant_model", "synced_gpus")))
            break
    for frame in frames:  # the decorators around it, which still hold every keyword
        if not frame.f_globals["__name__"].startswith(("torch.", "transformers.")):
            break
        asked.tokenizer = frame.f_locals.get("kwargs", {}).get("tokenizer", asked.tokenizer)
    return asked


def _refuse(input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any], asked: _Asked) -> None:
    """Raise ValueError naming what was asked for and cannot be honoured."""
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    cache = model_kwargs.get("cache")
    known = {"attention_mask", "position_ids", "cache", "use_cache", "logits_to_keep", *_OUTPUTS}
    refused = {
        "assistant_model": asked.assistant_model is not None,
        "synced_gpus": bool(asked.synced_gpus),
        "num_beams": (config.num_beams or 1) > 1,
        "num_return_sequences": (config.num_return_sequences or 1) > 1,
        "constraints": bool(config.constraints),
        "force_words_ids": bool(config.force_words_ids),
        "penalty_alpha": config.get_generation_mode() == GenerationMode.CONTRASTIVE_SEARCH,
        "prompt_lookup_num_tokens": config.prompt_lookup_num_tokens is not None,
        "assistant_early_exit": config.assistant_early_exit is not None,
        "use_mtp": bool(config.use_mtp),
        "dola_layers": config.dola_layers is not None,
        **{name: bool(getattr(config, name)) for name in _OUTPUTS},
        "use_cache=False": config.use_cache is False,
        "cache_implementation": config.cache_implementation is not None,
        "a cache of one's own": getattr(cache, "_is_user_defined", False),
        "a batch of more than one prompt": input_ids.shape[0] > 1,
        "an attention_mask with padding": mask is not None and not bool(mask.all()),
        "position_ids of one's own": positions is not None and positions[0].tolist() != list(range(input_ids.shape[1])),
        **{name: value is not None for name, value in model_kwargs.items() if name not in known},
    }
    if names := [name for name, asked_for in refused.items() if asked_for]:
        raise ValueError(
            f"treegraft.generate cannot honour {', '.join(names)}: it decodes one prompt, greedily or by sampling; "
            "leave that out, or leave out custom_generate"
        )


def _stop_strings(strings: str | list[str], asked: _Asked) -> StopStringCriteria:
    if asked.tokenizer is None:
        raise ValueError("stop_strings need the model's tokenizer; give `generate` tokenizer=...")
    return StopStringCriteria(asked.tokenizer, strings)
