"""Time and memory of `fit-value` and `distill` on logs of growing size: a real log, repeated with jitter.

    python benchmarks/scale.py --log runs/demo/log --latency runs/demo/latency.json --out runs/scale

Every copy of a prompt has a name of its own, its signals differ by 1 % and its scores by 5 % at random. The logs stay
in OUT, some 45 MB a million decision points, and are used again.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import typer

from treegraft.data.log import DECISIONS, LEAVES, TABLES, as_file, read_manifest, write_manifest, write_part
from treegraft.runtime.signals import SIGNALS


def main(
    log: Annotated[Path, typer.Option(help="A real log.")],
    latency: Annotated[Path, typer.Option(help="Latency profile.")],
    out: Annotated[Path, typer.Option()],
    sizes: Annotated[str, typer.Option(help="Millions of decision points.")] = "0.1,1,10",
) -> None:
    print("decision points | prompts | log, MB | fit-value, s | distill, s | peak memory, GiB")
    for size in map(float, sizes.split(",")):
        folder = out / f"log-{size:g}"
        if not (folder / "manifest.json").exists():
            repeat(log, folder, round(size * 1e6))
        parts = read_manifest(folder)["parts"]
        points = sum(part["decisions"]["rows"] for part in parts)
        megabytes = sum(part[table]["bytes"] for part in parts for table in TABLES) / 1e6
        value = out / f"value-{size:g}"
        fit = measured("fit-value", "--log", folder, "--latency", latency, "--out", value)
        distill = measured("distill", "--value", value, "--out", out / f"scheduler-{size:g}.json")
        print(
            f"{points} | {len(parts)} | {megabytes:.0f} | {fit[0]:.0f} | {distill[0]:.0f} | "
            f"{max(fit[1], distill[1]):.1f}",
            flush=True,
        )


def repeat(log: Path, folder: Path, points: int) -> None:
    """Write a log of `points` decision points or a few more: the prompts of `log` in turn, with jitter."""
    manifest, generator = read_manifest(log), np.random.default_rng(0)
    folder.mkdir(parents=True)
    parts, rows, number = manifest["parts"], 0, 0
    manifest["parts"] = []
    # Prompt by prompt across the files, so that a small log has some of each.
    files = list(dict.fromkeys(part["file"] for part in parts))
    turns = [[part for part in parts if part["file"] == file] for file in files]
    while rows < points:
        own = turns[number % len(files)]
        round_ = number // len(files)
        part, copy = own[round_ % len(own)], round_ // len(own)
        name = f"{part['prompt']}~{copy}"
        tables = {table: pq.read_table(log / part[table]["file"]) for table in TABLES}
        made = {
            table: as_file(jittered(tables[table], schema, name, generator))
            for table, schema in zip(TABLES, (DECISIONS, LEAVES))
        }
        manifest["parts"].append({**part, "prompt": name, **write_part(folder, number, made)})
        rows, number = rows + made[TABLES[0]][0], number + 1
    write_manifest(folder, manifest)


def jittered(table: pa.Table, schema: pa.Schema, prompt: str, generator: np.random.Generator) -> pa.Table:
    """The table under another prompt's name; real-valued signals times 1 +- 0.01, a tree's scores times 1 +- 0.05."""
    columns = {}
    for field in schema:
        column = table[field.name].combine_chunks()
        if field.name == "prompt":
            column = pa.array([prompt] * len(table)).dictionary_encode().cast(field.type)
        elif field.name in SIGNALS and pa.types.is_floating(field.type):
            column = pa.array(column.to_numpy() * (1 + 0.01 * generator.standard_normal(len(table))), field.type)
        elif field.name == "log_s":
            lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
            factor = np.repeat(np.abs(1 + 0.05 * generator.standard_normal(len(table))), lengths)
            values = pa.array(pc.list_flatten(column).to_numpy() * factor, pa.float32())
            column = pa.ListArray.from_arrays(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), values)
        columns[field.name] = column
    return pa.table(columns, schema=schema)


def measured(*command: str | Path) -> tuple[float, float]:
    """Run a treegraft command: seconds of wall time, and its peak memory in GiB."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "treegraft.cli", *map(str, command)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"treegraft {command[0]} failed")
    return time.perf_counter() - began, usage.ru_maxrss / 2**20


if __name__ == "__main__":
    typer.run(main)
