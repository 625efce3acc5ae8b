"""The engine for many machines: a Ray actor for each share of GPUs or CPUs, given prompts as it becomes free."""

import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from treegraft.collect.worker import Outcome, Worker
from treegraft.data.log import difference
from treegraft.data.prompts import Prompt

PATIENCE = 10  # seconds without news, after which it is asked whether the cluster is still there
AHEAD = 16  # prompts, for each worker, that may be begun beyond the first unfinished one
LOSSES = 3  # workers that one prompt may cost; and that may be lost in a row while they load, for each worker wanted


class EngineError(ValueError):
    """Workers that cannot be had or that do not agree; the message says what to do."""


@contextmanager
def ray_engine(
    load: Callable[[], Worker],
    address: str | None = None,
    workers: int | None = None,
    num_gpus: float = 0.0,
    num_cpus: float = 1.0,
) -> Iterator["RayEngine"]:
    """Workers on the Ray cluster at `address`, or on one of this machine alone, made for the purpose and on loopback.

    `load` runs in every worker. A worker holds `num_gpus` GPUs and `num_cpus` CPUs; by default there are as many as the
    cluster has room for. Raises EngineError where Ray is missing, no cluster answers or there is no room.
    """
    if not (shares := {kind: share for kind, share in (("GPU", num_gpus), ("CPU", num_cpus)) if share}):
        raise EngineError("--num-gpus 0 --num-cpus 0: a worker needs a share of something")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # of these systems alone by name: listen on loopback only
    try:
        import ray
    except ImportError as error:
        raise EngineError(f"--engine ray needs Ray ({error}): pip install treegraft[ray]") from error
    _check_answers(address or "")
    ray.init(address or "local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        has = ray.cluster_resources()
        room = min(int(has.get(kind, 0) / share) for kind, share in shares.items())
        if room < (workers or 1) and (address is None or workers is None):
            wanted = " and ".join(f"{share:g} {kind}" for kind, share in shares.items())
            raise EngineError(
                f"--workers {workers or 1} of {wanted} each: there is room for {room}; ask for fewer, or for smaller "
                "ones (--num-gpus, --num-cpus)"
            )
        actor = ray.remote(num_gpus=num_gpus, num_cpus=num_cpus)(Actor)
        yield RayEngine(ray, lambda: actor.remote(load), workers or room)
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Raise EngineError where nothing listens at "HOST:PORT"; Ray itself would try for minutes and not say where."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        try:
            socket.create_connection((host, int(port)), PATIENCE).close()
        except OSError as error:
            raise EngineError(
                f"--address {address}: no Ray cluster answers there ({error}); `ray start --head` starts one and says "
                "its address"
            ) from error


class Actor:
    """What runs on a share of the cluster."""

    def __init__(self, load: Callable[[], Worker]):
        self.load = load

    def begin(self) -> dict[str, Any]:
        """Load the models; returns the settings, by which the workers are compared."""
        self.worker = self.load()
        return self.worker.settings

    def collect(self, prompt: Prompt) -> Outcome:
        return self.worker.collect(prompt)


class RayEngine:
    """Hands prompts to actors; a lost actor is replaced and its prompt handed out again."""

    def __init__(self, ray: Any, start: Callable[[], Any], workers: int):
        """`start()` makes an actor. Returns when one has loaded its models; the others join as they do."""
        self._ray, self._start, self._workers = ray, start, workers
        self._idle: list[Any] = []
        self._busy: dict[Any, tuple[Any, int | None]] = {}  # by call: the actor, and the prompt's place; None: begins
        self._lost: Counter[int | None] = Counter()
        self.settings: dict[str, Any] = {}
        for _ in range(workers):
            self._begin()
        while not self.settings:
            self._wait()

    def run(self, prompts: Iterable[Prompt]) -> Iterator[Outcome]:
        """The outcomes in the prompts' order. A prompt that has cost `LOSSES` workers is one that failed."""
        coming, more = enumerate(prompts), True
        begun: dict[int, Prompt] = {}  # by place, and not yet given back
        waiting: list[int] = []  # drawn, or their workers lost
        finished: dict[int, Outcome] = {}
        first = 0  # place of the next to give back
        while begun or more:
            while self._idle and (waiting or (more and len(begun) < AHEAD * self._workers)):
                if not waiting:
                    if (drawn := next(coming, None)) is None:
                        more = False
                        break
                    place, begun[place] = drawn
                    waiting.append(place)
                place, actor = waiting.pop(), self._idle.pop()
                self._busy[actor.collect.remote(begun[place])] = actor, place
            if first in finished:
                yield finished.pop(first)
                del begun[first]
                first += 1
            elif begun or more:
                ended, outcome = self._wait()
                if ended is None:
                    continue
                if outcome is not None:
                    finished[ended] = outcome
                elif self._lost[ended] < LOSSES:
                    waiting.append(ended)
                else:
                    error = f"{LOSSES} workers were lost while they collected it, perhaps for want of memory"
                    finished[ended] = Outcome(begun[ended], [], {}, error)

    def _begin(self) -> None:
        """Make an actor, which loads its models as soon as the cluster has room for it."""
        actor = self._start()
        self._busy[actor.begin.remote()] = actor, None

    def _wait(self) -> tuple[int | None, Outcome | None]:
        """Wait for one call: the place of its prompt and the outcome, or None for an actor that has begun or was lost.

        Raises what an actor raises while it loads its models, and EngineError where such workers are of no use.
        """
        while not (ended := self._ray.wait(list(self._busy), timeout=PATIENCE)[0]):
            if not any(node["Alive"] for node in self._ray.nodes()):
                raise EngineError("the cluster has lost its last machine; the same command goes on with another one")
        [call] = ended
        actor, place = self._busy.pop(call)
        try:
            result = self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except self._ray.exceptions.RayError as error:
            self._lost[place] += 1
            if place is None and self._lost[None] == LOSSES * self._workers:
                raise EngineError(
                    f"{self._lost[None]} workers in a row were lost while they loaded: {error}"
                ) from error
            self._ray.kill(actor)  # it may be out of reach only
            self._begin()
            return place, None
        self._idle.append(actor)
        if place is not None:
            return place, result
        self._lost[None] = 0
        self.settings = self.settings or result
        if told := difference(result, self.settings):
            raise EngineError(f"a worker has {told}, as the first has; give all machines the same models")
        return None, None
