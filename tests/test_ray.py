"""Collection by Ray: the log of one process, whatever becomes of the workers."""

import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
import ray
from gathered import DRAFTING, TOKENS, as_prompts, assert_same_log

from treegraft.collect import ray_engine
from treegraft.collect.collector import collect, collect_with
from treegraft.collect.worker import Outcome, Sampling, Settings, Worker
from treegraft.data import log
from treegraft.data.log import read_manifest
from treegraft.data.prompts import Prompt

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests


@dataclass(frozen=True)
class Mortal(Worker):
    """A worker whose process is killed over prompt 3 once, and over prompt "deadly" whenever it is tried."""

    folder: Path

    def collect(self, prompt: Prompt) -> Outcome:
        with (self.folder / prompt.id).open("a") as tried:
            tried.write(f"{os.getpid()}\n")
        if prompt.id == "deadly" or (prompt.id == "3" and len((self.folder / "3").read_text().split()) == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().collect(prompt)


class Idle:
    """A worker that loads nothing and never finishes a prompt."""

    settings: ClassVar = {"models": {}}

    def collect(self, prompt: Prompt) -> Outcome:
        time.sleep(3600)
        raise AssertionError


def test_two_workers_of_which_one_is_killed_make_the_log_of_one_process(pair, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(ray_engine, "LOSSES", 2)  # loading a worker takes seconds
    monkeypatch.setenv("RAY_worker_niceness", "0")  # as other tests, on a busy machine
    harmless = as_prompts(8)
    prompts = [*harmless, Prompt("tiny", "deadly", text="t1")]
    alone, together, tried = (tmp_path / name for name in ("alone", "together", "tried"))
    tried.mkdir()
    collect(*pair("llama"), harmless, alone, DRAFTING, Sampling(), TOKENS)

    names, how = [model.name for model in pair("llama")], Settings(DRAFTING, Sampling(), TOKENS)

    def load() -> Mortal:
        made = Worker.load(*names, "cpu", "float32", None, how)
        return Mortal(made.target, made.medium, how, tried)

    done: list[int] = []
    with ray_engine.ray_engine(load, workers=2, num_cpus=0.5) as engine:
        _, failed = collect_with(engine, prompts, together, progress=lambda so_far, total: done.append(so_far))

    assert done == list(range(len(prompts) + 1))
    assert [line["prompt"] for line in failed] == ["deadly"] and "2 workers were lost" in failed[0]["error"]
    (together / log.FAILED).unlink()
    assert [part["prompt"] for part in read_manifest(together)["parts"]] == [prompt.id for prompt in harmless]
    assert_same_log(together, alone)
    attempts = {path.name: len(path.read_text().split()) for path in tried.iterdir()}
    assert attempts == {**{prompt.id: 1 for prompt in harmless}, "3": 2, "deadly": 2}


def test_without_ray_the_extra_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install treegraft\[ray\]"), ray_engine.ray_engine(lambda: None):
        pass


def test_an_address_with_nothing_behind_it_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with (
        pytest.raises(ray_engine.EngineError, match=f"--address 127.0.0.1:{port}: no Ray cluster answers there"),
        ray_engine.ray_engine(lambda: None, f"127.0.0.1:{port}"),
    ):
        pass


def test_a_cluster_that_lost_its_last_machine_ends_the_collection(monkeypatch) -> None:
    monkeypatch.setattr(ray_engine, "PATIENCE", 1)
    with ray_engine.ray_engine(Idle, workers=1, num_cpus=0.5) as engine:
        (raylet,) = [process for process in psutil.Process().children(recursive=True) if process.name() == "raylet"]
        raylet.kill()
        with pytest.raises(ray_engine.EngineError, match="lost its last machine"):
            list(engine.run(as_prompts(1)))
