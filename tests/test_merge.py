"""Logs that were collected apart become the one that would have been collected together."""

from dataclasses import replace
from pathlib import Path

import pytest
from gathered import DRAFTING, TOKENS, as_prompts, assert_same_log, gather

from treegraft.collect.collector import collect
from treegraft.collect.merge import Merged, merge
from treegraft.collect.worker import Sampling
from treegraft.data import log
from treegraft.data.log import LogError, read_failed, read_manifest
from treegraft.data.prompts import Prompt, take_shard


def shards(pair, folder: Path, count: int) -> list[Path]:  # type: ignore[no-untyped-def]
    """The 8 prompts in `count` logs."""
    folders = [folder / f"shard-{index}" for index in range(1, count + 1)]
    for index, shard in enumerate(folders, start=1):
        some = take_shard(as_prompts(8), f"{index}/{count}")
        collect(*pair("llama"), some, shard, DRAFTING, Sampling(), TOKENS)
    return folders


def test_merged_shards_are_the_log_made_in_one_go(pair, whole: Path, tmp_path: Path) -> None:
    assert merge(tmp_path / "merged", shards(pair, tmp_path, 3)) == Merged(prompts=8, duplicates=0, failed=0)
    assert_same_log(tmp_path / "merged", whole)
    ours, theirs = (read_manifest(folder) for folder in (tmp_path / "merged", whole))
    for part, other in zip(ours.pop("parts"), theirs.pop("parts"), strict=True):
        for name in log.TABLES:  # contents differ in wall times
            for fact in ("sha256", "bytes"):
                del part[name][fact], other[name][fact]
        assert part == other
    assert ours == theirs


def test_a_merged_log_can_be_gone_on_with(pair, whole: Path, tmp_path: Path) -> None:
    merge(tmp_path / "merged", shards(pair, tmp_path, 3)[:2])
    gather(pair, tmp_path / "merged", 8)
    assert_same_log(tmp_path / "merged", whole)


def test_duplicates_are_dropped_and_counted(pair, whole: Path, tmp_path: Path) -> None:
    first = shards(pair, tmp_path, 2)[0]
    assert merge(tmp_path / "merged", [first, whole, first]) == Merged(prompts=8, duplicates=8, failed=0)
    assert_same_log(tmp_path / "merged", whole)


def test_failures_are_kept_save_those_that_another_log_holds(pair, whole: Path, tmp_path: Path) -> None:
    failing = tmp_path / "failing"
    endless = Prompt("tiny", "endless", text="t1 " * 600)
    collect(*pair("llama"), [endless], failing, DRAFTING, Sampling(), TOKENS)
    lines = [{"file": "tiny", "prompt": "7", "sha256": "", "error": "out of memory"}, *read_failed(failing)]
    log.write_failed(failing, lines)
    assert merge(tmp_path / "merged", [failing, whole, failing]) == Merged(prompts=8, duplicates=0, failed=1)
    assert read_failed(tmp_path / "merged") == lines[1:]


def test_logs_of_other_settings_or_models_are_refused_by_the_difference(pair, whole: Path, tmp_path: Path) -> None:
    target, medium = pair("llama")
    collect(target, medium, as_prompts(1), tmp_path / "seed", DRAFTING, Sampling(seed=1), TOKENS)
    collect(target, target, as_prompts(1), tmp_path / "models", DRAFTING, Sampling(), TOKENS)
    for other, told in (("seed", r"sampling\.seed = 1, not 0"), ("models", r"models\.medium\.name = .*, not ")):
        with pytest.raises(LogError, match=rf"{other} was collected with {told}.* as in {whole}"):
            merge(tmp_path / "merged", [whole, tmp_path / other])
    assert not (tmp_path / "merged").exists()


def test_logs_of_the_same_weights_under_another_name_are_merged(pair, whole: Path, tmp_path: Path) -> None:
    models = [replace(model, name=f"elsewhere/{role}") for role, model in zip("tm", pair("llama"))]
    collect(*models, as_prompts(8)[4:], tmp_path / "rest", DRAFTING, Sampling(), TOKENS)
    gather(pair, tmp_path / "first", 4)
    merge(tmp_path / "merged", [tmp_path / "first", tmp_path / "rest"])
    assert_same_log(tmp_path / "merged", whole)
    assert read_manifest(tmp_path / "merged")["models"] == read_manifest(whole)["models"]


def test_another_prompt_of_the_same_id_is_refused_and_nothing_made(pair, whole: Path, tmp_path: Path) -> None:
    edited = tmp_path / "edited"
    collect(*pair("llama"), [Prompt("tiny", "3", text="t1 t2")], edited, DRAFTING, Sampling(), TOKENS)
    with pytest.raises(LogError, match=f"{edited} holds another prompt tiny/3 than {whole}"):
        merge(tmp_path / "merged", [whole, edited])
    assert not (tmp_path / "merged").exists()


def test_a_damaged_part_is_not_merged(pair, tmp_path: Path) -> None:
    gather(pair, tmp_path / "log", 2)
    part = tmp_path / "log" / read_manifest(tmp_path / "log")["parts"][1]["leaves"]["file"]
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    with pytest.raises(LogError, match=f"{part.name}: altered"):
        merge(tmp_path / "merged", [tmp_path / "log"])
    assert not (tmp_path / "merged" / log.MANIFEST).exists()


def test_only_an_empty_folder_is_merged_into(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    with pytest.raises(LogError, match="holds note; give a new folder"):
        merge(tmp_path, [whole])
    assert [path.name for path in tmp_path.iterdir() if path.name != log.LOCK] == ["note"]


@pytest.mark.parametrize("count", [1, 3, 8, 11])
def test_shards_in_order_are_all_prompts_and_of_equal_size(count: int) -> None:
    prompts = as_prompts(8)
    parts = [take_shard(prompts, f"{index}/{count}") for index in range(1, count + 1)]
    assert [prompt for part in parts for prompt in part] == prompts
    assert {len(part) for part in parts} <= {8 // count, -(-8 // count)}


@pytest.mark.parametrize("shard", ["0/3", "4/3", "1", "1/0", "a/b", "-1/3", "1/3/5", ""])
def test_a_shard_out_of_range_is_refused(shard: str) -> None:
    with pytest.raises(ValueError, match=r"--shard .* from 1 to n"):
        take_shard(as_prompts(8), shard)
