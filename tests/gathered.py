"""Small logs of the tiny models, and the one rule by which two of them are the same."""

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tiny import prompts as random_prompts

from treegraft.collect.collector import collect
from treegraft.collect.worker import Sampling
from treegraft.data import log
from treegraft.data.files import Location, listing, location
from treegraft.data.log import read_log, read_manifest
from treegraft.data.prompts import Prompt
from treegraft.runtime.drafting import Drafting

DRAFTING = Drafting(depth=2, width=2, children=2, budget=6)
TOKENS = 4
fork = multiprocessing.get_context("fork")  # children start with the models loaded


def as_prompts(count: int) -> list[Prompt]:
    return [Prompt("tiny", str(i), text=" ".join(f"t{t}" for t in ids)) for i, ids in enumerate(random_prompts(count))]


def gather(pair, folder: str | Location, count: int, **more):  # type: ignore[no-untyped-def]
    return collect(*pair("llama"), as_prompts(count), folder, DRAFTING, Sampling(), TOKENS, **more)


def table(folder: Location, name: str) -> list[dict]:
    """The rows of a table of every part that the manifest names, in the prompts' order, without the wall times."""
    parts = sorted(read_manifest(folder)["parts"], key=lambda part: int(part["prompt"]))
    files = [log.read_part(folder, part)[name][1] for part in parts]
    found = [row for file in files for row in pq.read_table(pa.BufferReader(file)).to_pylist()]
    return [{k: v for k, v in row.items() if not k.endswith("_ms")} for row in found]


def assert_same_log(folder: str | Location, whole: Path) -> None:
    folder = location(folder)
    for name in log.TABLES:
        assert table(folder, name) == table(whole, name)
    files = {part[name]["file"] for part in read_manifest(folder)["parts"] for name in log.TABLES}
    assert listing(folder).keys() - {log.LOCK} == {*files, log.MANIFEST}
    read_log(folder)


def in_child(work: Callable[[], object]):  # type: ignore[no-untyped-def]
    child = fork.Process(target=work)
    child.start()
    return child


def killed_at_every_moment(collect_until: Callable[[int], None], moments: int) -> Iterator[int | None]:
    """Collect in children that kill themselves at moment 0, then 1 .. `moments` over and over, until one gets through.

    Yields each killed child's process id.
    """
    moment = 0
    while True:
        child = in_child(partial(collect_until, moment))
        child.join()
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        yield child.pid
        moment = moment % moments + 1
