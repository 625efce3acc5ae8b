"""What a caller does to a model or a process after the first text shows in the next one, or is refused in words."""

import copy
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny import VOCABULARY, config, greedy, prompts, save_lm
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedTokenizerFast

import treegraft
from treegraft.runtime import forward as forwarding
from treegraft.runtime.decode import Decoded, end_tokens
from treegraft.runtime.decoder import Stream
from treegraft.runtime.models import Model, ModelError, fingerprint_of, load_model

PROMPT = prompts(4, seed=4)[3]


@pytest.fixture
def model(pair) -> Model:
    """A target of its own, to be changed."""
    target = pair("llama")[0]
    return replace(target, lm=copy.deepcopy(target.lm))


def steer(_: nn.Module, inputs: Any, output: Any) -> Any:
    """Add to the last position's state alone, as steering hooks do."""
    states = (output[0] if isinstance(output, tuple) else output).clone()
    states[:, -1, :] += torch.linspace(-4, 4, states.shape[-1])
    return (states, *output[1:]) if isinstance(output, tuple) else states


def test_a_hook_that_takes_the_last_position_for_the_token_is_refused_whenever_it_comes(model) -> None:
    decoder = treegraft.Decoder(model)
    decoder.generate(PROMPT, 4)
    handle = model.lm.model.layers[0].register_forward_hook(steer)
    with pytest.raises(ModelError, match="of their spread away"):
        decoder.generate(PROMPT, 4)
    with pytest.raises(ModelError, match="of their spread away"):
        treegraft.Decoder(model).generate(PROMPT, 4)
    handle.remove()
    assert decoder.generate(PROMPT, 12).tokens == greedy(model, PROMPT, 12)


def test_layers_whose_precision_depends_on_their_inputs_are_refused(model) -> None:
    model.lm = torch.ao.quantization.quantize_dynamic(model.lm, {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ModelError, match="of their spread away"):
        treegraft.Decoder(model).generate(PROMPT, 4)


def test_a_target_that_went_back_to_training_is_refused(tmp_path: Path) -> None:
    model = load_model(str(save_lm(tmp_path, config("llama", attention_dropout=0.5), 0)))
    decoder = treegraft.Decoder(model)
    decoder.generate(PROMPT, 4)
    model.lm.train()
    with pytest.raises(ModelError, match=r"call its eval\(\)"):
        decoder.generate(PROMPT, 4)


@pytest.mark.parametrize("kind", [list, tuple, set, torch.tensor])
def test_end_tokens_come_in_any_container(model, kind) -> None:
    text = greedy(model, PROMPT, 8)
    model.lm.generation_config.eos_token_id = kind([text[3], VOCABULARY - 1])
    assert end_tokens(model) == {text[3], VOCABULARY - 1}
    assert treegraft.Decoder(model).generate(PROMPT, 8).tokens == text[: text.index(text[3]) + 1]


def test_weights_that_are_not_in_memory_are_refused(model) -> None:
    model.lm.to("meta")
    with pytest.raises(ModelError, match="not in memory"):
        treegraft.Decoder(model).generate(PROMPT, 4)


def test_another_default_device_touches_nothing(model) -> None:
    decoder = treegraft.Decoder(model)
    with torch.device("meta"):
        tokens = decoder.generate(PROMPT, 12).tokens
    assert tokens == greedy(model, PROMPT, 12)


def test_a_forked_child_waits_for_no_thread_of_its_parent() -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with forwarding.alone:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        os._exit(0 if forwarding.alone.acquire(timeout=5) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    done.set()
    thread.join()


def test_quantised_weights_have_the_fingerprint_of_what_they_stand_for() -> None:
    plain = nn.Linear(64, 64).requires_grad_(False)

    class Halved(torch.Tensor):
        """Weights that are kept otherwise than they are read."""

        def dequantize(self) -> torch.Tensor:
            return self.as_subclass(torch.Tensor)

        def flatten(self, *_: Any) -> Any:
            raise NotImplementedError

    other = nn.Linear(64, 64).requires_grad_(False)
    other.load_state_dict(plain.state_dict())
    other.weight = nn.Parameter(other.weight.data.as_subclass(Halved), requires_grad=False)
    assert fingerprint_of(other) == fingerprint_of(plain)  # type: ignore[arg-type]


def test_an_adapters_folder_without_peft_is_refused(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("treegraft.runtime.models.find_spec", lambda name: None)
    folder = save_lm(tmp_path, config("llama"), 0)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"holds an adapter.*pip install peft"):
        load_model(str(folder))


def test_a_model_that_prepares_its_inputs_itself_and_a_wrapped_drafter_are_refused(model) -> None:
    ids: Any = {"input_ids": torch.tensor([PROMPT]), "attention_mask": torch.ones(1, len(PROMPT)), "max_new_tokens": 4}
    with pytest.raises(ModelError, match=r"medium is a Sequential.*get_base_model"):
        model.lm.generate(**ids, custom_generate=treegraft.generate, medium=nn.Sequential(), schedule="medium")
    # Of its own, as under PEFT's prompt tuning.
    model.lm.prepare_inputs_for_generation = model.lm.prepare_inputs_for_generation
    with pytest.raises(ModelError, match="prepares its inputs in a way of its own"):
        model.lm.generate(**ids, custom_generate=treegraft.generate)


def test_a_chat_template_that_fails_is_told(model) -> None:
    model.tokenizer = copy.deepcopy(model.tokenizer)
    model.tokenizer.chat_template = "{{ 1 + 'a' }}"
    with pytest.raises(ValueError, match=r"chat template of .* refuses these messages: unsupported operand"):
        treegraft.Decoder(model).generate([{"role": "user", "content": "t1"}])


def test_pieces_add_up_to_the_text_where_a_tokenizer_cleans_up_spaces(model) -> None:
    inner = Tokenizer(WordLevel({"<unk>": 0, "it": 1, "'": 2, "s": 3, "fine": 4}, unk_token="<unk>"))
    model.tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", clean_up_tokenization_spaces=True
    )
    rounds = [Decoded([1, 2, 3, 4][:count]) for count in (1, 2, 3, 4)]
    stream = Stream(treegraft.Decoder(model)._answers(iter(rounds), model, 1))
    assert "".join(stream) == stream.answer.text == "it ' s fine"


def test_a_stream_that_broke_off_does_not_end(model) -> None:
    stream = treegraft.Decoder(model).stream(PROMPT, 20)
    next(stream)
    model.lm.get_output_embeddings().weight.fill_(float("nan"))
    for _ in range(2):
        with pytest.raises(ValueError, match="NaN"):
            next(stream)


def test_a_mask_that_another_threads_forward_takes_here_hides_the_future() -> None:
    lm = tiny.random_lm("llama", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    ids = torch.tensor([PROMPT])
    own = lm(ids).logits
    lm.config._attn_implementation = "treegraft"
    masks = []
    lm.model.layers[0].self_attn.register_forward_pre_hook(
        lambda _, args, more: masks.append(more["attention_mask"]), with_kwargs=True
    )
    torch.testing.assert_close(lm(ids).logits, own)
    assert masks[0] is not None and masks[0].shape[-2:] == (len(PROMPT), len(PROMPT))
