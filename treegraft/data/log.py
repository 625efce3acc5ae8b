"""The log of a collection: a folder of Parquet parts and a manifest that names only whole parts (docs/log-format.md).

One prompt is one part: `decisions-N.parquet` (a row per decision point) and `leaves-N.parquet` (a row per schedule).
Files appear whole (data/files.py), so that whatever kills the writer, a reader finds no half of one.
"""

import fnmatch
import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from filelock import FileLock, Timeout
from upath import UPath

from treegraft.data.files import Location, listing, location, write_whole
from treegraft.runtime.drafting import Drafting
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


def read_manifest(folder: Location) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LogError(
            f"{folder}: not a log ({type(error).__name__}: {error}); `treegraft collect` makes one"
        ) from error
    if not isinstance(manifest, dict) or not {"parts", "drafting", "signals", "models"} <= manifest.keys():
        raise LogError(f"{path}: not a manifest; `treegraft collect` makes one")
    if manifest.get("version") != VERSION:
        raise LogError(f"{path}: log version {manifest.get('version')!r}; this treegraft reads version {VERSION}")
    try:
        Drafting(**manifest["drafting"])
        files = [part[table]["file"] for part in manifest["parts"] for table in TABLES]
        prompts = [(part["file"], part["prompt"]) for part in manifest["parts"]]
        strange = [name for name in files if not part_files([name]) or "/" in name]
    except (KeyError, TypeError, ValueError) as error:
        raise LogError(f"{path}: damaged or altered ({type(error).__name__}: {error}); collect again") from error
    if strange or len(set(prompts)) < len(prompts) or len(set(files)) < len(files):
        what = f"names {strange[0]!r}" if strange else "names a prompt or a file twice"
        raise LogError(f"{path}: altered, it {what}; put the collector's own back, or collect again")
    return manifest


def write_manifest(folder: Location, manifest: dict[str, Any]) -> None:
    """Replace the manifest; a part has a line, since it is written after every prompt and indenting is slow."""
    head = json.dumps({name: value for name, value in manifest.items() if name != "parts"}, indent=1)
    parts = ",\n".join(json.dumps(part) for part in manifest["parts"])
    write_whole(folder / MANIFEST, f'{head[:-2]},\n "parts": [\n{parts}\n ]\n}}\n'.encode())


def difference(there: dict[str, Any], here: dict[str, Any]) -> str:
    """How the settings of a manifest differ from others, by field ("drafting.width = 2, not 3"); "" where they agree.

    Parts, and the versions that a log was begun with, are no settings; a model is its weights, whatever it is called.
    """
    flat, other = (_flat({k: v for k, v in s.items() if k not in ("parts", "versions")}) for s in (there, here))

    def differ(name: str) -> bool:
        return flat.get(name) != other.get(name)

    # A model's name is told beside its fingerprint.
    differing = [name for name in flat | other if differ(name) and differ(name.replace(".name", ".fingerprint"))]
    return ", ".join(f"{name} = {flat.get(name)}, not {other.get(name)}" for name in differing[:3])


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def read_failed(folder: Location) -> list[dict[str, Any]]:
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


def write_failed(folder: Location, failed: Iterable[dict[str, Any]]) -> None:
    """Replace failed.jsonl; where nothing failed there is no such file."""
    if lines := [json.dumps(line) + "\n" for line in failed]:
        write_whole(folder / FAILED, "".join(lines).encode())
    else:
        (folder / FAILED).unlink(missing_ok=True)


@contextmanager
def locked(folder: Location) -> Iterator[None]:
    """Hold the folder against other writers; raises LogError while one holds it.

    A local lock is the system's and ends with its holder, however that ends: the file that stays behind means nothing.
    In a store it is an object, made only if there is none, and stays if its holder is killed.
    """
    lock = folder / LOCK
    with _system_lock(lock) if isinstance(lock, Path) else _lock_object(lock):
        yield


@contextmanager
def _system_lock(path: Path) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise LogError(
            f"{path.parent}: another collector is at work here; wait for it, or use another --out"
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _lock_object(path: UPath) -> Iterator[None]:
    holder = f"process {os.getpid()} on {platform.node()} since {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    try:
        path.fs.pipe_file(path.path, holder.encode(), mode="create")
    except OSError as error:
        if not path.exists():
            raise LogError(f"{path.parent}: cannot be written ({error})") from error
        raise LogError(
            f"{path.parent}: another collector is at work here ({path.read_text()}); wait for it, or use another "
            f"--out; if it was killed, delete {path}"
        ) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def tidy(folder: Location, manifest: dict[str, Any]) -> None:
    """Delete what a killed writer left: files half written, and parts that the manifest does not name."""
    named = {part[table]["file"] for part in manifest["parts"] for table in TABLES}
    files = listing(folder)
    for name in {*fnmatch.filter(files, ".*.partial"), *part_files(files)} - named:
        (folder / name).unlink()


def part_files(names: Iterable[str], tables: Iterable[str] = TABLES) -> list[str]:
    """Those of a folder's files that are parts' tables."""
    return sorted(name for table in tables for name in fnmatch.filter(names, f"{table}-*.parquet"))


Tables = dict[str, tuple[int, bytes]]  # of one part, by table: rows and Parquet file


def encode(decisions: list[dict], leaves: list[dict]) -> Tables:
    """A prompt's rows as the two tables' files; raises ValueError where a value does not fit its column."""
    made = zip(TABLES, (decisions, leaves), (DECISIONS, LEAVES), strict=True)
    return {name: as_file(pa.Table.from_pylist(rows, schema=schema)) for name, rows, schema in made}


def as_file(table: pa.Table) -> tuple[int, bytes]:
    """A table's rows, and the Parquet file of it."""
    file = pa.BufferOutputStream()
    pq.write_table(table, file, use_dictionary=_repeating(table.schema), compression="zstd", compression_level=9)
    return len(table), file.getvalue().to_pybytes()


def _repeating(schema: pa.Schema) -> list[str]:
    """The columns worth a dictionary: all but floats, whose values hardly repeat within a page."""
    elements = {field.name: getattr(field.type, "value_type", field.type) for field in schema}
    return [
        f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name
        for field in schema
        if not pa.types.is_floating(elements[field.name])
    ]


def write_part(folder: Location, number: int, tables: Tables) -> dict[str, Any]:
    """Write a prompt's two tables, each whole or not at all; returns what the manifest says of them."""
    part: dict[str, Any] = {}
    for name, (rows, content) in tables.items():
        file = f"{name}-{number:06d}.parquet"
        write_whole(folder / file, content)
        part[name] = {"file": file, "rows": rows, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return part


def read_part(folder: Location, part: dict[str, Any]) -> Tables:
    """The files of a part; raises LogError where one is missing or is not what was written."""
    tables: Tables = {}
    for table in TABLES:
        path = folder / part[table]["file"]
        try:
            content = path.read_bytes()
        except FileNotFoundError as error:
            raise _missing(path, part) from error
        if hashlib.sha256(content).hexdigest() != part[table]["sha256"]:
            raise _altered(path, "hash")
        tables[table] = part[table]["rows"], content
    return tables


def check_parts(folder: Location, parts: list[dict[str, Any]]) -> None:
    """Raise LogError where a file of these parts is missing or is not what was written.

    A store keeps its objects' content itself, so there names and sizes are compared, by one listing.
    """
    files = listing(folder)
    for part in parts:
        for table in TABLES:
            path = folder / part[table]["file"]
            if path.name not in files:
                raise _missing(path, part)
            if files[path.name] != part[table]["bytes"]:
                raise _altered(path, "size")
        if isinstance(folder, Path):
            read_part(folder, part)


def _missing(path: Location, part: dict[str, Any]) -> LogError:
    return LogError(
        f"{path}: missing, though the manifest names it; `treegraft collect` with the prompt file {part['file']!r} "
        "makes it again"
    )


def _altered(path: Location, what: str) -> LogError:
    return LogError(
        f"{path}: altered or truncated since it was collected (its {what} differs); delete it, and `treegraft "
        "collect` makes it again"
    )


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


def read_log(folder: str | Location) -> tuple[dict[str, Any], list[Answer]]:
    """A log's manifest and its answers; raises LogError as `read_answers` does."""
    manifest = read_manifest(folder := location(folder))
    return manifest, read_answers(folder, manifest, manifest["parts"])


def read_answers(folder: Location, manifest: dict[str, Any], parts: Iterable[dict[str, Any]]) -> list[Answer]:
    """The answers of some parts of a log; raises LogError for one that is missing or was altered, and for none."""
    answers: list[Answer] = []
    drafting = manifest["drafting"]
    for part in parts:
        decisions, leaves = (pq.read_table(pa.BufferReader(file)) for _, file in read_part(folder, part).values())
        if told := _disagreement(part, leaves, drafting):
            raise LogError(
                f"{folder / part['leaves']['file']}: {told}; one of them was altered: collect into another folder"
            )
        answers += _answers(decisions, leaves, part, drafting["depth"], drafting["budget"])
    if not answers:
        raise LogError(f"{folder}: holds no finished prompt yet; run `treegraft collect` again to go on")
    return answers


def _disagreement(part: dict[str, Any], leaves: pa.Table, drafting: dict[str, Any]) -> str:
    """How a part's leaves contradict what the manifest says of them; "" where they agree."""
    told = {(part["file"], part["prompt"], turn, *lengths) for turn, lengths in enumerate(part["lengths"])}
    keys = ["file", "prompt", "turn", "prompt_length", "answer_length"]
    for own in leaves.group_by(keys).aggregate([]).to_pylist():
        if tuple(own.values()) not in told:
            return f"holds {own}, which is not what {MANIFEST} says of it"
    for name, most in (("log_s", drafting["budget"]), ("tokens", drafting["depth"])):
        longest = pc.max(pc.list_value_length(leaves[name])).as_py() or 0
        if longest > most:
            return f"holds {longest} values of {name}, more than the {most} of {MANIFEST}"
    return ""


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
