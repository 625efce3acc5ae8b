import json
from pathlib import Path

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tiny import prompts as random_prompts

from treegraft.collect import worker
from treegraft.collect.collector import Sampling, collect
from treegraft.collect.positions import Positions
from treegraft.data.log import LEAVES, LogError, read_log, read_manifest
from treegraft.data.prompts import Prompt
from treegraft.runtime.decode import Plan, decode
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.medium import LMDrafter
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


def drafters_of(monkeypatch: pytest.MonkeyPatch) -> list[LMDrafter]:
    """The medium drafters that the collector makes from now on."""
    made: list[LMDrafter] = []
    monkeypatch.setattr(worker, "LMDrafter", lambda *of: made.append(LMDrafter(*of)) or made[-1])
    return made


def test_a_block_of_positions_costs_one_medium_forward_a_step(pair, tmp_path: Path, monkeypatch) -> None:
    target, medium = pair("llama")
    made = drafters_of(monkeypatch)
    collect(target, medium, as_prompts(1), tmp_path, DRAFTING, Sampling(), 2 * worker.BLOCK + 1)
    assert made[0].calls == 2 * DRAFTING.depth


def test_neighbouring_positions_share_work_and_nothing_else(pair, tmp_path: Path, monkeypatch) -> None:
    target, medium = pair("llama")
    made = drafters_of(monkeypatch)
    for block in (worker.BLOCK, 1):
        monkeypatch.setattr(worker, "BLOCK", block)
        collect(target, medium, as_prompts(2), tmp_path / str(block), DRAFTING, Sampling(), TOKENS)
    together, alone = ([drafter.tokens for drafter in made[i : i + 2]] for i in (0, 2))
    assert sum(together) < 0.8 * sum(alone)
    tables = [rows(tmp_path / str(block), "leaves") for block in (16, 1)]
    for ours, theirs in zip(*tables, strict=True):
        np.testing.assert_allclose(ours.pop("log_s"), theirs.pop("log_s"), atol=1e-4)
        assert ours == theirs


def test_fewer_positions_are_logged_as_asked(pair, tmp_path: Path) -> None:
    target, medium = pair("llama")
    every = tmp_path / "every:1"
    collect(target, medium, as_prompts(3), every, DRAFTING, Sampling(), TOKENS)
    held: dict[str, list[int]] = {}
    for asked in ("every:4", "sample:0.4"):
        for folder in (tmp_path / asked, tmp_path / f"{asked} again"):
            more = {"positions": Positions.parse(asked)}
            collect(target, medium, as_prompts(3), folder, DRAFTING, Sampling(), TOKENS, **more)
        assert read_manifest(folder)["positions"] == asked
        assert rows(tmp_path / asked, "leaves") == rows(folder, "leaves")
        answers = read_log(folder)[1]
        held[asked] = [len(answer.positions) for answer in answers]
        for part, full in zip(answers, read_log(every)[1]):
            for name in ("ranks", "q", "tokens"):
                np.testing.assert_array_equal(getattr(part, name), getattr(full, name)[part.positions])
            np.testing.assert_allclose(part.signals, full.signals[part.positions], atol=1e-4)
        with pytest.raises(LogError, match="positions"):
            collect(target, medium, as_prompts(3), folder, DRAFTING, Sampling(), TOKENS)
    assert held["every:4"] == [3, 3, 3] and len(set(held["sample:0.4"])) > 1


@pytest.mark.parametrize("text", ["every:0", "every:1.5", "sample:0", "sample:1.1", "sample:nan", "some", ""])
def test_a_bad_choice_of_positions_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--positions"):
        Positions.parse(text)


def test_a_sample_is_about_the_share_asked_for() -> None:
    chosen = Positions.parse("sample:0.25").chosen("an answer", 4000)
    assert 900 < len(chosen) < 1100
    assert chosen != Positions.parse("sample:0.25").chosen("another answer", 4000)


def test_duckdb_reads_the_log_as_it_is(pair, tmp_path: Path) -> None:
    target, medium = pair("llama")
    collect(target, medium, as_prompts(2), tmp_path, DRAFTING, Sampling(), TOKENS)
    query = "select mask, count(*), sum(len(accepted)) from '{}/leaves-*.parquet' group by mask order by mask"
    found = duckdb.sql(query.format(tmp_path)).fetchall()
    leaves = rows(tmp_path, "leaves")
    accepted = [sum(len(leaf["accepted"]) for leaf in leaves if leaf["mask"] == mask) for mask in range(8)]
    assert found == [(mask, 2 * (TOKENS - 1), accepted[mask]) for mask in range(8)]
    joined = duckdb.sql(
        f"select count(*) from '{tmp_path}/decisions-*.parquet' d join '{tmp_path}/leaves-*.parquet' l using (file, "
        "prompt, turn, position) where d.step = 1 and l.mask = 0"
    ).fetchall()
    assert joined == [(2 * (TOKENS - 1),)]


def test_an_interrupted_collection_goes_on_where_it_stopped(pair, tmp_path: Path, monkeypatch) -> None:
    target, medium = pair("llama")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    collect(target, medium, as_prompts(3), whole, DRAFTING, Sampling(), TOKENS)
    inner = worker.collect_prompt
    asked: list[str] = []

    def interrupted(target, medium, prompt, *rest):  # type: ignore[no-untyped-def]
        asked.append(prompt.id)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return inner(target, medium, prompt, *rest)

    monkeypatch.setattr(worker, "collect_prompt", interrupted)
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


def test_a_log_has_a_seed_that_it_names(pair, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"seed is None; .*give a whole number"):
        collect(*pair("llama"), as_prompts(1), tmp_path, DRAFTING, Sampling(temperature=1.0, seed=None), TOKENS)
