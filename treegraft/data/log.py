"""The log of a collection: a folder of Parquet parts and a manifest that names only whole parts (docs/log-format.md).

One prompt is one part: `decisions-N.parquet` (a row per decision point) and `leaves-N.parquet` (a row per schedule).
Files are written aside, flushed and renamed, so that whatever kills the writer, a reader finds whole ones.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from treegraft.runtime.signals import LOGGED, SIGNALS

VERSION = 1
MANIFEST, FAILED, LOCK = "manifest.json", "failed.jsonl", ".lock"
TABLES = ("decisions", "leaves")

KEYS = [
    pa.field("file", pa.dictionary(pa.int32(), pa.string())),  # base name of the prompt file
    pa.field("prompt", pa.dictionary(pa.int32(), pa.string())),  # the prompt's id in that file
    pa.field("turn", pa.int8()),
    pa.field("position", pa.int32()),  # answer tokens before the root
]
DECISIONS = pa.schema(
    [
        *KEYS,
        pa.field("token", pa.int32()),  # the root's
        *(pa.field(name, pa.type_for_alias(SIGNALS[name].dtype)) for name in LOGGED),
        pa.field("position_ms", pa.float32()),  # wall time, the one column that differs between equal runs
    ]
)
LEAVES = pa.schema(
    [
        *KEYS,
        pa.field("prompt_length", pa.int32()),
        pa.field("answer_length", pa.int32()),
        pa.field("mask", pa.int32()),
        pa.field("log_s", pa.list_(pa.float32())),  # of the nodes in order, cut at B
        pa.field("accepted", pa.list_(pa.int16())),  # rank in that order of each accepted node
        pa.field("q", pa.int16()),  # accepted nodes, from the root on, that the medium drafter processed
        pa.field("tokens", pa.list_(pa.int16())),  # nodes processed by each step's medium call; 0: no call
    ]
)


class LogError(ValueError):
    """A log that cannot be used; the message names the folder or file and what to do."""


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LogError(f"{folder}: not a log ({error}); `treegraft collect` makes one") from error
    if not isinstance(manifest, dict) or not {"parts", "drafting", "signals", "models"} <= manifest.keys():
        raise LogError(f"{path}: not a manifest; `treegraft collect` makes one")
    if manifest.get("version") != VERSION:
        raise LogError(f"{path}: log version {manifest.get('version')!r}; this treegraft reads version {VERSION}")
    return manifest


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    _whole(folder / MANIFEST, lambda aside: aside.write_text(json.dumps(manifest, indent=1) + "\n"))


def read_failed(folder: Path) -> list[dict[str, Any]]:
    """The prompts that could not be collected: file, prompt, the prompt's sha256, and the error."""
    path = folder / FAILED
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    except ValueError as error:
        raise LogError(f"{path}: not JSON Lines ({error}); delete it, and its prompts are tried again") from error
    for number, line in enumerate(lines, start=1):
        if not isinstance(line, dict) or not {"file", "prompt", "sha256", "error"} <= line.keys():
            raise LogError(
                f"{path}, line {number}: needs file, prompt, sha256 and error; delete it, and its prompt is tried again"
            )
    return lines


def write_failed(folder: Path, failed: Iterable[dict[str, Any]]) -> None:
    """Replace failed.jsonl; where nothing failed there is no such file."""
    lines = [json.dumps(line) + "\n" for line in failed]
    if lines:
        _whole(folder / FAILED, lambda aside: aside.write_text("".join(lines)))
    else:
        (folder / FAILED).unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder against other collectors; raises LogError while one holds it.

    The lock is the system's and ends with its holder, however that ends: the file that stays behind means nothing.
    """
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise LogError(f"{folder}: another collector is at work here; wait for it, or use another --out") from error
    try:
        yield
    finally:
        lock.release()


def tidy(folder: Path, manifest: dict[str, Any]) -> None:
    """Delete what a killed writer left: files half written, and parts that the manifest does not name."""
    named = {part[table]["file"] for part in manifest["parts"] for table in TABLES}
    for pattern in (".*.partial", *(f"{table}-*.parquet" for table in TABLES)):
        for path in folder.glob(pattern):
            if path.name not in named:
                path.unlink()


def as_tables(decisions: list[dict], leaves: list[dict]) -> list[pa.Table]:
    """A prompt's rows as the two tables; raises ValueError where a value does not fit its column."""
    return [pa.Table.from_pylist(decisions, schema=DECISIONS), pa.Table.from_pylist(leaves, schema=LEAVES)]


def write_part(folder: Path, number: int, tables: list[pa.Table]) -> dict[str, Any]:
    """Write a prompt's two tables, whole or not at all; returns what the manifest says of them."""
    part: dict[str, Any] = {}
    for name, table in zip(TABLES, tables, strict=True):
        path = folder / f"{name}-{number:06d}.parquet"
        write = partial(
            pq.write_table, table, use_dictionary=_repeating(table.schema), compression="zstd", compression_level=9
        )
        _whole(path, write)
        part[name] = {"file": path.name, "rows": len(table), "bytes": path.stat().st_size, "sha256": _sha256(path)}
    return part


def _repeating(schema: pa.Schema) -> list[str]:
    """The columns worth a dictionary: all but floats, whose values hardly repeat within a page."""
    elements = {field.name: getattr(field.type, "value_type", field.type) for field in schema}
    return [
        f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name
        for field in schema
        if not pa.types.is_floating(elements[field.name])
    ]


def check_part(folder: Path, part: dict[str, Any]) -> None:
    """Raise LogError where a file of a part is missing or is not what was written."""
    for table in TABLES:
        path = folder / part[table]["file"]
        if not path.exists():
            raise LogError(
                f"{path}: missing, though the manifest names it; `treegraft collect` with the prompt file "
                f"{part['file']!r} makes it again"
            )
        if _sha256(path) != part[table]["sha256"]:
            raise LogError(
                f"{path}: altered or truncated since it was collected (its hash differs); delete it, and `treegraft "
                "collect` makes it again"
            )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Write aside, flush to disk, rename: a reader sees the old file or the whole new one."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        write(aside)
        _flush(aside)
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)  # on a full disk its space is needed
        raise
    _flush(path.parent)


def _flush(path: Path) -> None:
    """Make a file's content, or a folder's renames, outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass
class Answer:
    """The logged facts of one answer, in arrays; P positions, M = 2^K masks, N = 2^K - 1 decision points, S signals.

    `signals` (P, N, S) float32 holds at [t, node(k, mask)] the signals before step k after the decisions in `mask`.
    Leaf arrays are indexed [t, mask]: `log_s` (P, M, B) float32, -inf past the last node; `ranks` (P, M, K) int16, B
    where no such accepted node; `q` (P, M) and `tokens` (P, M, K) int16.
    A mask outside the budget of medium calls has log_s all -inf and `possible` False.
    """

    file: str
    prompt: str
    turn: int
    prompt_length: int
    length: int  # answer tokens; positions are 0..length - 2
    signals: np.ndarray
    log_s: np.ndarray
    ranks: np.ndarray
    q: np.ndarray
    tokens: np.ndarray
    possible: np.ndarray
    positions: np.ndarray


def node(step: int, mask: Any) -> Any:
    """The index of a decision point: before step `step`, after the decisions in `mask`."""
    return (1 << (step - 1)) - 1 + mask


def read_log(folder: Path) -> tuple[dict[str, Any], list[Answer]]:
    """A log's manifest and its answers; raises LogError as `read_parts` does."""
    manifest = read_manifest(folder)
    return manifest, read_parts(folder, manifest, manifest["parts"])


def read_parts(folder: Path, manifest: dict[str, Any], parts: Iterable[dict[str, Any]]) -> list[Answer]:
    """The answers of some parts of a log; raises LogError for one that is missing or was altered, and for none."""
    answers: list[Answer] = []
    drafting = manifest["drafting"]
    for part in parts:
        check_part(folder, part)
        decisions, leaves = (pq.read_table(folder / part[table]["file"]) for table in TABLES)
        answers += _answers(decisions, leaves, part, drafting["depth"], drafting["budget"])
    if not answers:
        raise LogError(f"{folder}: holds no finished prompt yet; run `treegraft collect` again to go on")
    return answers


def _answers(decisions: pa.Table, leaves: pa.Table, part: dict[str, Any], depth: int, budget: int) -> list[Answer]:
    found = []
    signals = np.column_stack([decisions[name].to_numpy().astype(np.float32) for name in LOGGED])
    decided = {name: decisions[name].to_numpy() for name in ("turn", "position", "step", "mask")}
    leaf = {name: leaves[name].to_numpy() for name in ("turn", "position", "mask", "q")}
    for turn, (prompt_length, answer_length) in enumerate(part["lengths"]):
        rows = np.flatnonzero(leaf["turn"] == turn)
        positions, at = np.unique(leaf["position"][rows], return_inverse=True)
        masks = leaf["mask"][rows]
        shape = (len(positions), 1 << depth)
        answer = Answer(
            part["file"], part["prompt"], turn, prompt_length, answer_length,
            np.zeros((len(positions), node(depth + 1, 0), len(LOGGED)), np.float32),
            np.full((*shape, budget), -np.inf, np.float32), np.full((*shape, depth), budget, np.int16),
            np.zeros(shape, np.int16), np.zeros((*shape, depth), np.int16), np.zeros(shape, bool), positions,
        )  # fmt: skip
        for name, into in (("log_s", answer.log_s), ("accepted", answer.ranks), ("tokens", answer.tokens)):
            row, place, values = _lists(leaves[name].take(rows))
            into[at[row], masks[row], place] = values
        answer.q[at, masks] = leaf["q"][rows]
        answer.possible[at, masks] = True
        rows = np.flatnonzero(decided["turn"] == turn)
        at = np.searchsorted(positions, decided["position"][rows])
        answer.signals[at, node(decided["step"][rows], decided["mask"][rows])] = signals[rows]
        found.append(answer)
    return found


def _lists(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The values of a list column end to end, with the row that each is in and its place there; each (values,)."""
    lengths = pc.list_value_length(column).to_numpy()
    row = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    return row, np.arange(len(row)) - starts[row], pc.list_flatten(column).to_numpy()
