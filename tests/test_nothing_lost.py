"""Whatever stops a collector, what it gathered stays whole, and a restart ends at an undisturbed run's log."""

import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gathered import DRAFTING, TOKENS, as_prompts, assert_same_log, fork, gather, in_child, killed_at_every_moment

from treegraft.collect import worker
from treegraft.collect.collector import Sampling, collect
from treegraft.data import log
from treegraft.data.log import LogError, read_failed, read_log, read_manifest
from treegraft.data.prompts import Prompt
from treegraft.runtime.drafting import Drafting

KILLS = 25


def test_kills_at_random_moments_lose_nothing(pair, whole: Path, tmp_path: Path) -> None:
    generator = random.Random(0)
    start = time.perf_counter()
    gather(pair, tmp_path / "timed", 8)
    one = (time.perf_counter() - start) / 8  # seconds a prompt
    kills, log_number = 0, 0
    while kills < KILLS:
        folder = tmp_path / str(log_number)
        child = in_child(lambda: gather(pair, folder, 8))  # noqa: B023
        time.sleep(generator.uniform(0, 2 * one))
        child.kill()
        child.join()
        if child.exitcode == -signal.SIGKILL:
            kills += 1
        else:  # it was done before
            assert child.exitcode == 0
            assert_same_log(folder, whole)
            log_number += 1
    gather(pair, folder, 8)
    assert_same_log(folder, whole)


def test_a_kill_at_any_write_loses_nothing(pair, whole: Path, tmp_path: Path, monkeypatch) -> None:
    """os.replace and os.fsync are where a file turns into another; the child kills itself at the n-th of them."""
    names = ("fsync", "replace")
    usual = {name: getattr(os, name) for name in names}

    def collect_until(moment: int) -> None:
        left = iter(range(moment))

        def counted(name: str):  # type: ignore[no-untyped-def]
            def call(*arguments, **keywords):  # type: ignore[no-untyped-def]
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return usual[name](*arguments, **keywords)

            return call

        for name in names:
            setattr(os, name, counted(name))
        gather(pair, tmp_path, 8)

    for _ in killed_at_every_moment(collect_until, 9):  # a prompt takes nine such calls, so all of them are met
        pass
    assert_same_log(tmp_path, whole)


def test_a_second_collector_is_refused_and_a_dead_ones_lock_is_not_in_the_way(pair, whole, tmp_path: Path) -> None:
    ready = fork.Event()

    def hold() -> None:
        with log.locked(tmp_path):
            ready.set()
            time.sleep(60)

    child = in_child(hold)
    ready.wait()
    with pytest.raises(LogError, match="another collector is at work"):
        gather(pair, tmp_path, 8)
    child.kill()
    child.join()
    assert (tmp_path / log.LOCK).exists()
    gather(pair, tmp_path, 8)
    assert_same_log(tmp_path, whole)


@pytest.fixture
def small_disk() -> Iterator[Callable[[int], None]]:
    """small_disk(n): no file may grow beyond n bytes, so that writing fails as on a full disk."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def test_a_full_disk_stops_the_collector_and_harms_nothing(pair, whole: Path, tmp_path: Path, small_disk) -> None:
    gather(pair, tmp_path, 2)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    small_disk(1000)
    with pytest.raises(LogError, match=r"tiny/2 could not be written .*--retry-failed"):
        gather(pair, tmp_path, 8)
    small_disk(resource.RLIM_INFINITY)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert {path.name for path in tmp_path.iterdir()} == {*before, log.FAILED}
    assert [line["prompt"] for line in read_failed(tmp_path)] == ["2"]
    gather(pair, tmp_path, 8, retry_failed=True)
    assert_same_log(tmp_path, whole)


def test_a_failure_that_a_full_disk_cannot_note_is_named(pair, whole: Path, tmp_path: Path, small_disk) -> None:
    gather(pair, tmp_path, 8)
    endless = Prompt("tiny", "endless", text="t1 " * 600)
    small_disk(50)
    with pytest.raises(LogError, match=r"tiny/endless could not be written .* the earlier prompts are safe"):
        collect(*pair("llama"), [endless], tmp_path, DRAFTING, Sampling(), TOKENS)
    small_disk(resource.RLIM_INFINITY)
    assert_same_log(tmp_path, whole)


def test_a_failed_prompt_is_named_and_retried_when_asked(pair, whole: Path, tmp_path: Path, monkeypatch) -> None:
    usual = worker.decode
    errors = {2: torch.OutOfMemoryError("out of memory: tried to allocate 9 GiB"), 4: RuntimeError("a bad weight")}
    asked: list[int] = []

    def sometimes(*arguments, **keywords):  # type: ignore[no-untyped-def]
        asked.append(len(asked))
        if error := errors.get(asked[-1]):
            raise error
        return usual(*arguments, **keywords)

    monkeypatch.setattr(worker, "decode", sometimes)
    _, failed = gather(pair, tmp_path, 8)
    assert failed == read_failed(tmp_path) and [line["prompt"] for line in failed] == ["2", "4"]
    assert "OutOfMemoryError: out of memory: tried" in failed[0]["error"] and "a bad weight" in failed[1]["error"]
    assert [part["prompt"] for part in read_manifest(tmp_path)["parts"]] == ["0", "1", "3", "5", "6", "7"]
    gather(pair, tmp_path, 8)
    assert len(asked) == 8  # not tried again unasked
    gather(pair, tmp_path, 8, retry_failed=True)
    assert len(asked) == 10 and not (tmp_path / log.FAILED).exists()
    assert_same_log(tmp_path, whole)


def test_a_prompt_that_no_table_holds_fails_alone(pair, whole: Path, tmp_path: Path) -> None:
    """Half a surrogate pair is good JSON and no text."""
    odd = Prompt("tiny", "half \ud800", text="t1 t2")
    _, failed = collect(*pair("llama"), [odd, *as_prompts(8)], tmp_path, DRAFTING, Sampling(), TOKENS)
    assert failed == read_failed(tmp_path) and [line["prompt"] for line in failed] == [odd.id]
    assert failed[0]["error"].startswith("tiny/half \ud800: holds '\\ud800', which is no character")
    (tmp_path / log.FAILED).unlink()
    assert_same_log(tmp_path, whole)


def command_with_signals(pair, folder: Path, *numbers: int) -> tuple[int | None, str]:  # type: ignore[no-untyped-def]
    """`treegraft collect`, sent `numbers` while it decodes its third prompt; its exit code and what it said."""
    import json

    prompts, said = folder / "tiny.jsonl", folder / "said"
    prompts.write_text("".join(json.dumps({"id": p.id, "prompt": p.text}) + "\n" for p in as_prompts(8)))
    models = [f"--{role}={model.name}" for role, model in zip(("target", "medium"), pair("llama"))]
    shape = ["--depth=2", "--width=2", "--children=2", "--budget=6", f"--max-new-tokens={TOKENS}"]

    def command() -> None:
        from treegraft import cli

        usual, asked = worker.decode, iter(range(8))

        def signalled(*arguments, **keywords):  # type: ignore[no-untyped-def]
            if next(asked) == 2:
                for number in numbers:
                    os.kill(os.getpid(), number)
            return usual(*arguments, **keywords)

        worker.decode = signalled
        cli.console.file = said.open("w")
        sys.argv = ["treegraft", "collect", *models, *shape, "--out", str(folder / "log"), str(prompts)]
        cli.main()

    child = in_child(command)
    child.join()
    return child.exitcode, said.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_stop_signal_finishes_the_prompt_and_says_how_to_go_on(pair, whole, tmp_path: Path, number) -> None:
    code, said = command_with_signals(pair, tmp_path, number)
    assert code == 128 + number
    assert "3 prompts collected, 0 failed; 9 positions" in said
    assert f"stopped by {number.name}; the same command goes on" in said
    assert [part["prompt"] for part in read_manifest(tmp_path / "log")["parts"]] == ["0", "1", "2"]
    gather(pair, tmp_path / "log", 8)
    assert_same_log(tmp_path / "log", whole)


def test_a_second_interrupt_stops_at_once_and_says_how_to_go_on(pair, whole: Path, tmp_path: Path) -> None:
    code, said = command_with_signals(pair, tmp_path, signal.SIGINT, signal.SIGINT)
    assert code == 130
    assert "stopped at once; what was collected is kept, and the same command goes on" in said
    assert [part["prompt"] for part in read_manifest(tmp_path / "log")["parts"]] == ["0", "1"]
    gather(pair, tmp_path / "log", 8)
    assert_same_log(tmp_path / "log", whole)


def test_a_truncated_part_is_found_by_its_hash(pair, whole: Path, tmp_path: Path) -> None:
    gather(pair, tmp_path, 8)
    part = tmp_path / read_manifest(tmp_path)["parts"][3]["leaves"]["file"]
    part.write_bytes(part.read_bytes()[:-1])
    for use in (read_log, lambda folder: gather(pair, folder, 8)):
        with pytest.raises(LogError, match=f"{part.name}: altered or truncated"):
            use(tmp_path)
    part.unlink()
    with pytest.raises(LogError, match=f"{part.name}: missing"):
        read_log(tmp_path)
    gather(pair, tmp_path, 8)
    assert_same_log(tmp_path, whole)


def test_a_missing_part_is_not_dropped_when_its_prompt_is_not_asked_for(pair, whole: Path, tmp_path: Path) -> None:
    gather(pair, tmp_path, 8)
    parts = [tmp_path / read_manifest(tmp_path)["parts"][3][table]["file"] for table in log.TABLES]
    parts[1].unlink()
    with pytest.raises(LogError, match=f"{parts[1].name}: missing, .* with the prompt file 'tiny'"):
        gather(pair, tmp_path, 2)
    assert parts[0].exists() and len(read_manifest(tmp_path)["parts"]) == 8
    gather(pair, tmp_path, 8)
    assert_same_log(tmp_path, whole)


def test_parts_without_a_manifest_are_left_alone(pair, tmp_path: Path) -> None:
    gather(pair, tmp_path, 1)
    (tmp_path / log.MANIFEST).unlink()
    with pytest.raises(LogError, match=r"holds decisions-000000.parquet but no manifest.json"):
        gather(pair, tmp_path, 1)
    assert len(list(tmp_path.glob("*.parquet"))) == 2


def test_sampling_out_of_range_is_refused_before_a_log_is_made(pair, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="penalty"):
        collect(*pair("llama"), as_prompts(1), tmp_path / "log", DRAFTING, Sampling(repetition_penalty=0.0), TOKENS)
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    "line, complaint",
    [("{", "not JSON Lines"), ("[1]", "line 1: needs file"), ('{"file": "tiny"}', "line 1: needs file")],
)
def test_a_damaged_list_of_failures_is_named(pair, tmp_path: Path, line: str, complaint: str) -> None:
    (tmp_path / log.FAILED).write_text(line + "\n")
    with pytest.raises(LogError, match=f"{log.FAILED}.*{complaint}"):
        gather(pair, tmp_path, 1)


def test_a_kill_before_a_failure_is_struck_out_leaves_no_note_of_it(pair, whole: Path, tmp_path: Path) -> None:
    gather(pair, tmp_path, 8)
    log.write_failed(tmp_path, [{"file": "tiny", "prompt": "7", "sha256": "", "error": "out of memory"}])
    assert gather(pair, tmp_path, 8)[1] == []
    assert_same_log(tmp_path, whole)


def test_parts_newer_than_the_manifest_are_left_alone(pair, whole: Path, tmp_path: Path) -> None:
    gather(pair, tmp_path, 2)
    newer = tmp_path / log.MANIFEST
    older = newer.read_text()
    gather(pair, tmp_path, 8)
    there = newer.read_text()
    newer.write_text(older)
    with pytest.raises(LogError, match=r"older than its parts \(leaves-000002.parquet, "):
        gather(pair, tmp_path, 2)
    newer.write_text(there)
    assert_same_log(tmp_path, whole)


def test_going_on_with_other_settings_is_refused_by_the_difference(pair, tmp_path: Path) -> None:
    gather(pair, tmp_path, 1)
    target, medium = pair("llama")
    want = (target, medium, as_prompts(1), tmp_path)
    with pytest.raises(LogError, match=r"drafting\.width = 2, not 3; use"):
        collect(*want, Drafting(depth=2, width=3, children=2, budget=6), Sampling(), TOKENS)
    with pytest.raises(LogError, match=r"sampling\.seed = 0, not 1; use"):
        collect(*want, DRAFTING, Sampling(seed=1), TOKENS)
    with pytest.raises(LogError, match=r"models\.target\.name = .*, models\.target\.fingerprint = .*, not"):
        collect(medium, *want[1:], DRAFTING, Sampling(), TOKENS)


def test_a_models_name_does_not_matter_to_going_on(pair, whole: Path, tmp_path: Path) -> None:
    gather(pair, tmp_path, 4)
    target, medium = (replace(model, name=f"{model.name}/") for model in pair("llama"))
    collect(target, medium, as_prompts(8), tmp_path, DRAFTING, Sampling(), TOKENS)
    assert_same_log(tmp_path, whole)
    assert read_manifest(tmp_path)["models"] == read_manifest(whole)["models"]
    with pytest.raises(LogError, match=r"collected with sampling\.seed = 0, not 1; use"):
        collect(target, medium, as_prompts(8), tmp_path, DRAFTING, Sampling(seed=1), TOKENS)
