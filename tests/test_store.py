"""Logs and prompts in an object store are as those in a folder, whatever kills the writer."""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gathered import DRAFTING, TOKENS, as_prompts, assert_same_log, gather, in_child, killed_at_every_moment
from store import s3_store

from treegraft import cli
from treegraft.collect.collector import collect
from treegraft.collect.worker import Sampling
from treegraft.data import log
from treegraft.data.files import listing, location
from treegraft.data.log import LogError, read_failed, read_log, read_manifest
from treegraft.data.prompts import Prompt, PromptError, read_prompts


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_store(tmp_path_factory.mktemp("store")) as uri:
        yield uri


def test_a_log_in_a_store_is_that_of_a_folder(pair, whole: Path, bucket: str) -> None:
    gather(pair, f"{bucket}/log", 3)
    gather(pair, f"{bucket}/log", 8)
    assert_same_log(f"{bucket}/log", whole)


def test_a_log_in_memory_is_that_of_a_folder(pair, whole: Path) -> None:
    gather(pair, "memory://log", 8)
    assert_same_log("memory://log", whole)


def test_a_kill_at_any_write_to_a_store_loses_nothing(pair, whole: Path, bucket: str) -> None:
    """The child kills itself before or after its n-th object; the lock it leaves names it and is deleted by hand."""
    uri, usual = f"{bucket}/killed", log.write_whole

    def collect_until(moment: int) -> None:
        left = iter(range(moment))

        def counted(*arguments) -> None:  # type: ignore[no-untyped-def]
            for act in (usual, lambda *_: None):
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                act(*arguments)

        log.write_whole = counted
        gather(pair, uri, 8)

    for killed in killed_at_every_moment(collect_until, 6):  # a prompt is three objects
        with pytest.raises(LogError, match=rf"process {killed} on .*delete {uri}/\.lock"):
            gather(pair, uri, 8)
        location(f"{uri}/.lock").unlink()
    assert_same_log(uri, whole)


def test_kills_at_random_moments_leave_no_half_object(pair, whole: Path, bucket: str) -> None:
    generator, uri = random.Random(0), f"{bucket}/random"
    for _ in range(8):
        child = in_child(lambda: gather(pair, uri, 8))
        time.sleep(generator.uniform(0.1, 0.6))
        child.kill()
        child.join()
        location(f"{uri}/.lock").unlink(missing_ok=True)
    gather(pair, uri, 8)
    assert_same_log(uri, whole)


def test_a_second_collector_on_a_store_is_refused_until_the_first_has_ended(pair, bucket: str) -> None:
    uri = f"{bucket}/locked"
    with log.locked(location(uri)), pytest.raises(LogError, match=f"another collector.*process {os.getpid()} on"):
        gather(pair, uri, 1)
    assert listing(location(uri)) == {}
    gather(pair, uri, 1)
    assert len(read_manifest(location(uri))["parts"]) == 1


def test_a_damaged_object_is_named(pair, whole: Path, bucket: str) -> None:
    uri = f"{bucket}/damaged"
    gather(pair, uri, 8)
    part = location(uri) / read_manifest(location(uri))["parts"][3]["leaves"]["file"]
    content = part.read_bytes()
    part.write_bytes(content[:-1] + b"?")
    with pytest.raises(LogError, match=f"{part.name}: altered or truncated .* hash differs"):
        read_log(uri)
    part.write_bytes(content[:-1])
    with pytest.raises(LogError, match=f"{part.name}: altered or truncated .* size differs"):
        gather(pair, uri, 8)
    part.unlink()
    with pytest.raises(LogError, match=f"{part.name}: missing"):
        read_log(uri)
    gather(pair, uri, 8)
    assert_same_log(uri, whole)


def test_a_store_that_refuses_a_part_stops_the_collector_and_harms_nothing(
    pair, whole: Path, bucket: str, monkeypatch
) -> None:  # fmt: skip
    uri, usual = f"{bucket}/refused", log.write_whole
    gather(pair, uri, 2)

    def refuse(path, content: bytes) -> None:  # type: ignore[no-untyped-def]
        if path.name == "leaves-000002.parquet":
            raise PermissionError("no more room")
        usual(path, content)

    monkeypatch.setattr(log, "write_whole", refuse)
    with pytest.raises(LogError, match=r"tiny/2 could not be written \(no more room\).*--retry-failed"):
        gather(pair, uri, 8)
    assert [line["prompt"] for line in read_failed(location(uri))] == ["2"]
    assert "decisions-000002.parquet" not in listing(location(uri))
    monkeypatch.undo()
    gather(pair, uri, 8, retry_failed=True)
    assert_same_log(uri, whole)


def test_a_failed_prompt_is_noted_in_a_store(pair, bucket: str) -> None:
    endless = Prompt("tiny", "endless", text="t1 " * 600)
    collect(*pair("llama"), [endless, *as_prompts(1)], f"{bucket}/failed", DRAFTING, Sampling(), TOKENS)
    assert [line["prompt"] for line in read_failed(location(f"{bucket}/failed"))] == ["endless"]


def test_prompts_in_a_store_are_read_by_file_and_line(bucket: str) -> None:
    file = location(f"{bucket}/prompts/mine.jsonl")
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "b"}\n')
    assert [(p.file, p.text) for p in read_prompts([str(file)])] == [("mine", "a"), ("mine", "b")]
    file.write_bytes(b'{"prompt": "a"}\n{')
    with pytest.raises(PromptError, match=r"s3://bucket/prompts/mine.jsonl, line 2"):
        read_prompts([str(file)])
    with pytest.raises(PromptError, match=r"s3://bucket/prompts/absent.jsonl: cannot be read"):
        read_prompts([f"{bucket}/prompts/absent.jsonl"])


def test_shards_in_a_store_are_merged_fitted_distilled_and_replayed_as_they_are(pair, bucket: str, tmp_path) -> None:
    def run(*words: object) -> None:
        cli.app([str(word) for word in words], standalone_mode=False)

    asked, merged = f"{bucket}/asked/train.jsonl", f"{bucket}/merged"
    lines = [json.dumps({"prompt": prompt.text}) for prompt in as_prompts(8)]
    location(asked).write_bytes("\n".join(lines).encode())
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    models = [f"--{role}={model.name}" for role, model in zip(("target", "medium"), pair("llama"))]
    shape = ["--depth=2", "--width=2", "--children=2", "--budget=6", "--max-new-tokens=16"]
    run("collect", *models, *shape, "--out", tmp_path / "whole", tmp_path / "train.jsonl")
    shards = [f"{bucket}/shard-{index}" for index in (1, 2, 3)]
    for index, shard in enumerate(shards, start=1):
        run("collect", *models, *shape, "--out", shard, "--shard", f"{index}/3", asked)
    run("merge", merged, *shards)
    assert_same_log(merged, tmp_path / "whole")
    run("fit-value", "--log", merged, "--what-if", "r=0.3", "--model", "linear", "--out", tmp_path / "value")
    run("distill", "--value", tmp_path / "value", "--out", tmp_path / "scheduler.json", "--kind", "rules")
    run("evaluate", "--log", merged, "--what-if", "r=0.3", "--schedule", tmp_path / "scheduler.json")
    report = json.loads((tmp_path / "value" / "value.json").read_text())
    assert report["log"]["folder"] == merged


def test_a_bucket_that_refuses_the_log_is_named(pair, bucket: str, monkeypatch) -> None:
    fs = location(bucket).fs

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(fs, "pipe_file", refuse)
    with pytest.raises(LogError, match=r"s3://bucket/denied: cannot be written \(Access Denied\)"):
        gather(pair, f"{bucket}/denied", 1)


def test_a_uri_that_cannot_serve_is_refused_by_what_is_wanting(pair, monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"nowhere://x: cannot be opened"):
        location("nowhere://x")
    with pytest.raises(ValueError, match=r"http://127.0.0.1/log: a log is written to a local folder or to one of s3"):
        gather(pair, "http://127.0.0.1/log", 1)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ValueError, match=r"s3://bucket/x: .*pip install treegraft\[s3\]"):
        location("s3://bucket/x")
