"""The engine for one machine's cores: processes with the models of their own, given prompts as they become free.

Forking is mostly Python's work, which threads cannot share: two processes of one thread collect more than one of two.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

import joblib
import torch

from treegraft.collect.ray_engine import AHEAD, EngineError
from treegraft.collect.worker import Outcome, Worker
from treegraft.data.prompts import Prompt

_load: Callable[[], Worker]
_worker: Worker | None = None


@contextmanager
def process_engine(load: Callable[[], Worker], workers: int) -> Iterator["ProcessEngine"]:
    """`workers` processes that share the machine's cores; `load` runs in each.

    Raises what `load` raises, and EngineError where a process is lost.
    """
    threads, others = max(1, joblib.cpu_count() // workers), multiprocessing.active_children()
    # Not forked: a forked process cannot use the threads that torch has started here.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_begin, initargs=(load, threads))
    try:
        yield ProcessEngine(pool, workers)
    except BaseException as error:
        for process in set(multiprocessing.active_children()) - set(others):
            process.kill()
        if isinstance(error, BrokenProcessPool):
            raise EngineError(
                "a worker was lost, perhaps for want of memory; the same command goes on (give fewer --workers)"
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


class ProcessEngine:
    """Hands prompts to processes as they become free."""

    def __init__(self, pool: ProcessPoolExecutor, workers: int):
        self._pool, self._workers = pool, workers
        # A terminal signals all processes, and the collector alone says when to stop. The others start with
        # signals blocked: any that came while they load would end them.
        usual = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            loading = [pool.submit(_settings) for _ in range(workers)]  # each starts a process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, usual)
        self.settings: dict[str, Any] = loading[0].result()

    def run(self, prompts: Iterable[Prompt]) -> Iterator[Outcome]:
        """The outcomes in the prompts' order."""
        coming = iter(prompts)
        begun = deque[Future[Outcome]]()
        while True:
            while (
                len(begun) < AHEAD * self._workers
                and sum(not future.done() for future in begun) < self._workers
                and (prompt := next(coming, None)) is not None
            ):
                begun.append(self._pool.submit(_collect, prompt))
            if not begun:
                return
            if begun[0].done():
                yield begun.popleft().result()
            else:
                wait([future for future in begun if not future.done()], return_when=FIRST_COMPLETED)


def _begin(load: Callable[[], Worker], threads: int) -> None:
    global _load
    _load = load
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_collector, daemon=True).start()


def _end_with_collector() -> None:
    if collector := multiprocessing.parent_process():
        collector.join()
        os._exit(1)


def _loaded() -> Worker:
    global _worker
    if _worker is None:
        _worker = _load()
    return _worker


def _settings() -> dict[str, Any]:
    return _loaded().settings


def _collect(prompt: Prompt) -> Outcome:
    return _loaded().collect(prompt)
