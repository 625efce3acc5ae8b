"""The live benchmark against transformers' own decoders, on tiny models."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from tiny import greedy, prompts

from treegraft import bench, cli
from treegraft.bench import BEST_RIVAL, GENERATE, Record, Rival, as_autoregressive, best_rivals, summarise_live
from treegraft.data.prompts import Prompt
from treegraft.runtime.decode import Plan
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.models import load_model
from treegraft.runtime.scheduler import Mask
from treegraft.runtime.size import Cut

TOKENS = 24
RIVALS = ["prompt lookup 3", "prompt lookup 5", "prompt lookup 10", "assisted"]


def plan(mask: int) -> Plan:
    return Plan(bin(mask), Mask(mask), Drafting(depth=3, width=3, children=3, budget=12), Cut("none"))


def written(count: int, file: str, seed: int) -> list[Prompt]:
    texts = [" ".join(f"t{token}" for token in ids) for ids in prompts(count, seed=seed)]
    return [Prompt(file, str(i), text=text) for i, text in enumerate(texts)]


def record(file: str, prompt: str, schedule: str, ms: float) -> Record:
    return Record(file, prompt, schedule, 10, ms, 0, 0, 0, 1.0, 0, 0, 0, dict.fromkeys(bench.PARTS, 0.0), [])


def test_rivals_decode_the_targets_own_text_beside_our_schedules(pair) -> None:  # type: ignore[no-untyped-def]
    target, medium = pair("llama")
    asked = written(3, "one", seed=1) + written(2, "two", seed=2)
    rivals = bench.hugging_face(medium)
    records, failed = bench.run(target, medium, asked, [plan(0b000), plan(0b111)], TOKENS, rivals=rivals)
    assert not failed and {r.schedule for r in records} == {"generate", "autoregressive", *RIVALS, "0b0", "0b111"}
    assert all(r.tokens == TOKENS and r.different == 0 and 0 < r.first_token_ms < r.ms for r in records)
    assert sum(r.ties for r in records) <= 1

    summary = summarise_live(records, rivals)
    assert set(summary["by_file"]) == set(summary["best_rival"]) == {"one", "two"}
    for figures in (summary["overall"], *summary["by_file"].values()):
        assert set(figures) == {"autoregressive", "0b0", "0b111", *RIVALS, "generate", BEST_RIVAL}
        for name in ("0b0", "0b111"):
            low, high = figures[name]["over"][BEST_RIVAL]["interval"]
            assert low <= figures[name]["over"][BEST_RIVAL]["gain"] <= high
    json.dumps(summary)
    for file, name in summary["best_rival"].items():
        best = summary["by_file"][file][BEST_RIVAL]["tokens_per_second"]
        others = [summary["by_file"][file][rival]["tokens_per_second"] for rival in (*RIVALS, "generate")]
        assert best == summary["by_file"][file][name]["tokens_per_second"] == max(others)


def test_a_perfect_assistant_with_a_reduced_vocabulary_proposes_only_its_tokens(pair, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    target, _ = pair("llama")
    target.lm.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    common = [token for token in range(tiny.VOCABULARY) if token % 4]
    (tmp_path / "draft_vocabulary.json").write_text(json.dumps(common))
    reduced = load_model(str(tmp_path))
    ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        own, full = reduced.lm(ids).logits, bench.assistant(reduced)(ids).logits
        reference = target.lm(ids).logits
    assert own.shape[-1] == len(common) and full.shape == reference.shape
    torch.testing.assert_close(full[..., common], reference[..., common])
    assert torch.isneginf(full[..., ::4]).all()
    # The drafter's own head is as it was, and the text is the target's.
    assert reduced.lm.get_output_embeddings().weight.shape[0] == len(common)
    assisted = Rival("assisted", {"assistant_model": bench.assistant(reduced)})
    for prompt in prompts(4):
        assert tiny.same_text(
            target, prompt, bench.generate(target, prompt, TOKENS, assisted)[0], greedy(target, prompt, TOKENS)
        )


def test_an_assistant_saves_target_forwards(pair) -> None:  # type: ignore[no-untyped-def]
    target, _ = pair("qwen3")
    counts = []
    for rival in (GENERATE, Rival("assisted", {"assistant_model": bench.assistant(pair("qwen3")[1])})):
        forwards = 0

        def count(*_: object) -> None:
            nonlocal forwards
            forwards += 1

        hook = target.lm.get_output_embeddings().register_forward_hook(count)
        bench.generate(target, prompts(4)[3], TOKENS, rival)
        hook.remove()
        counts.append(forwards)
    assert counts[0] == TOKENS > counts[1]


def test_the_best_rival_is_chosen_file_by_file_over_all_prompts() -> None:
    rivals = [GENERATE, Rival("a"), Rival("b")]
    times = {"x": {"a": (1.0, 9.0), "b": (4.0, 4.0)}, "y": {"a": (2.0, 2.0), "b": (3.0, 3.0)}}
    records = [
        record(file, str(i), name, ms)
        for file, of_file in times.items()
        for name, both in {**of_file, "generate": (7.0, 7.0), "autoregressive": (8.0, 8.0), "ours": (1.0, 1.0)}.items()
        for i, ms in enumerate(both)
    ]
    assert best_rivals(records, rivals) == {"x": "b", "y": "a"}
    summary = summarise_live(records, rivals[1:])
    assert summary["overall"]["ours"]["over"][BEST_RIVAL]["gain"] == pytest.approx((8 + 4) / 4)
    assert summary["by_file"]["y"]["ours"]["over"][BEST_RIVAL]["gain"] == pytest.approx(2.0)
    page = bench.report_page(summary)
    assert page.count("<svg") == 3 and "x: b, y: a" in page


def test_ties_and_what_could_not_be_confirmed_are_counted_and_shown(capsys) -> None:
    records = [record("x", str(i), name, 5.0) for i in range(2) for name in ("autoregressive", "generate", "ours")]
    assert summarise_live(records)["overall"]["ours"]["text_equal"]
    records[2].ties, records[5].unconfirmed = 1, 2
    summary = summarise_live(records)
    figures = summary["overall"]["ours"]
    assert [figures[verdict] for verdict in ("texts_different", "ties", "unconfirmed")] == [0, 1, 2]
    assert not figures["text_equal"] and summary["overall"]["autoregressive"]["text_equal"]
    cli.print_table("overall", summary["overall"])
    for shown in (bench.report_page(summary), capsys.readouterr().out):
        assert "2 unconfirmed, 1 tied" in shown and "different" not in shown
    records[2].different = 1
    assert "1 different, 2 unconfirmed, 1 tied" in bench.report_page(summarise_live(records))


def test_the_baseline_is_the_faster_one_token_loop() -> None:
    ours = [record("x", "0", "autoregressive", 5.0), record("x", "0", "generate", 4.0)]
    assert [r.ms for r in as_autoregressive(ours)] == [4.0]
    assert [r.ms for r in as_autoregressive([ours[0], replace(ours[1], ms=6.0)])] == [5.0]
