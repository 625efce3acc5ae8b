"""Collection by processes of this machine: the log of one process, and none of them outlives the command."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from gathered import DRAFTING, TOKENS, as_prompts, assert_same_log

from treegraft.collect.collector import collect, collect_with
from treegraft.collect.processes import process_engine
from treegraft.collect.ray_engine import EngineError
from treegraft.collect.worker import Outcome, Sampling, Settings, Worker
from treegraft.data.log import read_manifest
from treegraft.data.prompts import Prompt
from treegraft.runtime.models import ModelError

HOW = Settings(DRAFTING, Sampling(), TOKENS)


class Mortal(Worker):
    """A worker whose process is killed over prompt 3."""

    def collect(self, prompt: Prompt) -> Outcome:
        if prompt.id == "3":
            time.sleep(0.5)  # the prompts before it come back
            os.kill(os.getpid(), signal.SIGKILL)
        return super().collect(prompt)


def loading(pair, kind: type[Worker] = Worker) -> partial[Worker]:  # type: ignore[no-untyped-def]
    names = [model.name for model in pair("llama")]
    return partial(kind.load, *names, "cpu", "float32", None, HOW)


def ids(folder: Path) -> list[str]:
    return [part["prompt"] for part in read_manifest(folder)["parts"]]


def test_a_lost_worker_ends_the_collection_and_the_same_command_goes_on(pair, tmp_path: Path) -> None:
    prompts = as_prompts(6)
    collect(*pair("llama"), prompts, tmp_path / "alone", DRAFTING, Sampling(), TOKENS)
    with pytest.raises(EngineError, match="fewer --workers"), process_engine(loading(pair, Mortal), 2) as engine:
        collect_with(engine, prompts, tmp_path / "log")
    assert ids(tmp_path / "log") == ["0", "1", "2"] and not multiprocessing.active_children()
    done: list[int] = []
    with process_engine(loading(pair), 2) as engine:
        collect_with(engine, prompts, tmp_path / "log", progress=lambda so_far, total: done.append(so_far))
    assert done == [3, 4, 5, 6]
    assert ids(tmp_path / "log") == [prompt.id for prompt in prompts]
    assert_same_log(tmp_path / "log", tmp_path / "alone")
    assert not multiprocessing.active_children()


def test_what_cannot_be_loaded_is_named_as_ever() -> None:
    load = partial(Worker.load, "no/such/model", "default", "cpu", "float32", None, HOW)
    with pytest.raises(ModelError, match="no/such/model"), process_engine(load, 2):
        pass
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_no_process_outlives_the_command(pair, tmp_path: Path, number: signal.Signals) -> None:
    """A terminal's SIGINT reaches all processes and loses nothing; whatever ends the collector ends the others."""
    (tmp_path / "mine.jsonl").write_text("".join(f'{{"prompt": "{p.text}"}}\n' for p in as_prompts(200)))
    models = [f"--{role}={model.name}" for role, model in zip(("target", "medium"), pair("llama"))]
    command = ["collect", *models, "--workers=2", "--out", str(tmp_path / "log"), str(tmp_path / "mine.jsonl")]
    shape = ["--depth=2", "--width=2", "--children=2", "--max-new-tokens=24"]
    running = subprocess.Popen([Path(sys.executable).with_name("treegraft"), *command, *shape], start_new_session=True)
    while not list(tmp_path.glob("log/leaves-*")):
        assert running.poll() is None
        time.sleep(0.1)
    workers = psutil.Process(running.pid).children(recursive=True)
    assert len(workers) >= 2
    if number == signal.SIGKILL:
        running.kill()
    else:
        os.killpg(running.pid, number)
    assert running.wait(60) == (128 + number if number == signal.SIGINT else -number)
    assert not psutil.wait_procs(workers, timeout=20)[1]
    made = ids(tmp_path / "log")
    assert 0 < len(made) < 200 and made == [str(i) for i in range(1, len(made) + 1)]
    assert not (tmp_path / "log" / "failed.jsonl").exists()
