import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tiny import prompts as random_prompts

from treegraft.collect import collector
from treegraft.collect.collector import Sampling, collect
from treegraft.data.log import LEAVES, LogError, read_log
from treegraft.data.prompts import Prompt
from treegraft.runtime.decode import Plan, decode
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.scheduler import Mask
from treegraft.runtime.signals import LOGGED, SIGNALS
from treegraft.runtime.size import Cut

DRAFTING = Drafting(depth=3, width=3, children=3, budget=12)
TOKENS = 12


def as_prompts(count: int) -> list[Prompt]:
    return [Prompt("tiny", str(i), text=" ".join(f"t{t}" for t in ids)) for i, ids in enumerate(random_prompts(count))]


def rows(folder: Path, table: str) -> list[dict]:
    """A table's rows without the wall times."""
    found = []
    for path in sorted(folder.glob(f"{table}-*.parquet")):
        found += pq.read_table(path).to_pylist()
    return [{k: v for k, v in row.items() if not k.endswith("_ms")} for row in found]


def test_every_position_logs_every_schedule(pair, tmp_path: Path) -> None:
    target, medium = pair("llama")
    collect(target, medium, as_prompts(2), tmp_path, DRAFTING, Sampling(), TOKENS)
    leaves, decisions = rows(tmp_path, "leaves"), rows(tmp_path, "decisions")
    assert len(leaves) == 2 * (TOKENS - 1) * 8 and len(decisions) == 2 * (TOKENS - 1) * 7
    assert {leaf["mask"] for leaf in leaves} == set(range(8))
    assert all(list(leaf["log_s"]) == sorted(leaf["log_s"], reverse=True) for leaf in leaves)
    assert all(np.isfinite([row[name] for name in LOGGED]).all() for row in decisions)


def test_a_leaf_is_the_tree_that_decoding_that_schedule_drafts(pair, tmp_path: Path) -> None:
    target, medium = pair("llama")
    prompt = as_prompts(3)[2]
    collect(target, medium, [prompt], tmp_path, DRAFTING, Sampling(), TOKENS)
    logged = {(leaf["position"], leaf["mask"]): leaf for leaf in rows(tmp_path, "leaves")}
    ids = target.tokenizer(prompt.text)["input_ids"]
    compared = 0
    for bits in range(8):
        trees = []
        plan = Plan("mask", Mask(bits), DRAFTING, Cut("none"))
        decoded = decode(target, medium, ids, plan, TOKENS, on_tree=lambda tree, *_: trees.append(tree))  # noqa: B023
        for tree, done in zip(trees, decoded.rounds, strict=True):
            leaf = logged[done.position, bits]
            ordered = [tree.log_s[node] for node in tree.ordered(DRAFTING.budget)]
            np.testing.assert_allclose(leaf["log_s"], ordered, atol=1e-4)
            assert (len(leaf["accepted"]), leaf["tokens"]) == (done.accepted, done.tokens)
            compared += 1
    assert compared > 20


def test_one_position_costs_one_medium_forward_a_step(pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, medium = pair("llama")
    drafters = []
    made = collector.LMDrafter
    monkeypatch.setattr(collector, "LMDrafter", lambda model: drafters.append(made(model)) or drafters[-1])
    collect(target, medium, as_prompts(1), tmp_path, DRAFTING, Sampling(), TOKENS)
    assert 0 < drafters[0].calls <= DRAFTING.depth * (TOKENS - 1)


def test_an_interrupted_collection_goes_on_where_it_stopped(pair, tmp_path: Path, monkeypatch) -> None:
    target, medium = pair("llama")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    collect(target, medium, as_prompts(3), whole, DRAFTING, Sampling(), TOKENS)
    inner = collector.collect_prompt
    asked: list[str] = []

    def interrupted(target, medium, prompt, *rest):  # type: ignore[no-untyped-def]
        asked.append(prompt.id)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return inner(target, medium, prompt, *rest)

    monkeypatch.setattr(collector, "collect_prompt", interrupted)
    with pytest.raises(KeyboardInterrupt):
        collect(target, medium, as_prompts(3), broken, DRAFTING, Sampling(), TOKENS)
    collect(target, medium, as_prompts(3), broken, DRAFTING, Sampling(), TOKENS)
    assert asked == ["0", "1", "1", "2"]
    for table in ("decisions", "leaves"):
        assert rows(whole, table) == rows(broken, table)


def test_a_prompt_that_cannot_be_decoded_is_reported_and_harms_no_other(pair, tmp_path: Path) -> None:
    target, medium = pair("llama")
    long = Prompt("tiny", "long", text="t1 " * 600)
    manifest, failed = collect(target, medium, [long, *as_prompts(1)], tmp_path, DRAFTING, Sampling(), TOKENS)
    assert [part["prompt"] for part in manifest["parts"]] == ["0"]
    assert failed[0]["prompt"] == "long" and "512" in failed[0]["error"]


def test_another_setting_is_refused_by_name_and_an_altered_part_by_its_hash(pair, tmp_path: Path) -> None:
    target, medium = pair("llama")
    collect(target, medium, as_prompts(1), tmp_path, DRAFTING, Sampling(), TOKENS)
    with pytest.raises(LogError, match="max_new_tokens = 12, not 13"):
        collect(target, medium, as_prompts(1), tmp_path, DRAFTING, Sampling(), 13)
    with pytest.raises(LogError, match="models"):
        collect(medium, target, as_prompts(1), tmp_path, DRAFTING, Sampling(), TOKENS)
    part = next(tmp_path.glob("leaves-*.parquet"))
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(LogError, match=part.name):
        read_log(tmp_path)


def test_sampled_answers_are_logged_by_their_own_text(pair, tmp_path: Path) -> None:
    target, medium = pair("llama")
    prompt = as_prompts(2)[1]
    sampling = Sampling(temperature=1.0, seed=3)
    collect(target, medium, [prompt], tmp_path, DRAFTING, sampling, TOKENS)
    ids = target.tokenizer(prompt.text)["input_ids"]
    plan = Plan("small", Mask(0), DRAFTING, Cut("none"))
    answer = decode(target, None, ids, plan, TOKENS, sampling.chooser()).tokens
    logged = {row["position"]: row["token"] for row in rows(tmp_path, "decisions")}
    assert [logged[t] for t in range(TOKENS - 1)] == answer[:-1]


def test_the_documented_columns_are_those_of_the_log(pair, tmp_path: Path) -> None:
    documented = (Path(__file__).parent.parent / "docs" / "log-format.md").read_text()
    for name in [*SIGNALS, *LEAVES.names]:
        assert f"`{name}`" in documented, name
    target, medium = pair("llama")
    collect(target, medium, as_prompts(1), tmp_path, DRAFTING, Sampling(), TOKENS)
    for field in json.loads((tmp_path / "manifest.json").read_text()):
        assert f"`{field}`" in documented, field


def test_target_uncertainty_is_that_of_the_root(pair, tmp_path: Path) -> None:
    target, medium = pair("llama")
    prompt = as_prompts(2)[1]
    collect(target, medium, [prompt], tmp_path, DRAFTING, Sampling(), TOKENS)
    ids = target.tokenizer(prompt.text)["input_ids"]
    for row in rows(tmp_path, "decisions")[:: 7 * 4]:
        answer = [r["token"] for r in rows(tmp_path, "decisions") if r["step"] == 1][: row["position"]]
        with torch.inference_mode():
            log_p = target.lm(torch.tensor([ids + answer])).logits[0, -1].log_softmax(-1)
        assert row["target_entropy"] == pytest.approx(float(-(log_p.exp() * log_p).sum()), abs=1e-4)
        assert int(log_p.argmax()) == row["token"]
