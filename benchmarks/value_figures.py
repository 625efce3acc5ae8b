"""What the value system gains on a log under several latency profiles, and what distillation keeps of it.

    python benchmarks/value_figures.py LOG OUT 0.05 0.15 0.3 1.0 latency.json

A profile is a what-if ratio r or a file from `treegraft profile`. Each is fitted and distilled into OUT (what is there
already is not made again); all figures are cross-validated by prompt.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from treegraft.distill.distill import distill
from treegraft.runtime.latency import LatencyProfile
from treegraft.value_system.value import fit_value

COLUMNS = (
    "profile", "small", "medium", "best mask", "value model", "oracle", "ships", "over the better endpoint",
    "over the best fixed mask", "of the oracle's gap", "of the value model's gain", "worst and best benchmark",
)  # fmt: skip
END, FIXED, GAP = "gain_over_better_endpoint", "gain_over_best_fixed", "oracle_gap_share"


def main(log: Path, out: Path, profiles: Annotated[list[str], typer.Argument(help="r, or a latency.json")]) -> None:
    found = {name: measured(log, out / Path(name).stem if name.endswith(".json") else out / f"r{name}", priced(name))
             for name in profiles}  # fmt: skip
    print(f"| {' | '.join(COLUMNS)} |\n{'| --- ' * len(COLUMNS)}|")
    for name, figures in found.items():
        speeds = [f"{figures['speedups'][policy]:.3f}" for policy in
                  ("small", "medium", "best mask", "value model", "oracle over masks and cuts")]  # fmt: skip
        ships, model = figures["ships"], figures["model"]["overall"]
        overall = ships["overall"]
        by_file = {file: row[END]["value"] for file, row in ships["by_file"].items()}
        worst, best = min(by_file, key=by_file.__getitem__), max(by_file, key=by_file.__getitem__)
        kept = overall[END]["value"] / model[END]["value"] if model[END]["value"] > 0.005 else None
        print("|", " | ".join([
            name, *speeds, ships["schedule"], interval(overall[END]), interval(overall[FIXED]),
            f"{overall[GAP]['value']:.0%}", "-" if kept is None else f"{kept:.0%}",
            f"{worst} {by_file[worst]:+.1%}, {best} {by_file[best]:+.1%}",
        ]), "|")  # fmt: skip
    files = list(next(iter(found.values()))["ships"]["by_file"])
    print(f"\n| over the better endpoint | {' | '.join(files)} |\n| --- {'| --- ' * len(files)}|")
    for name, figures in found.items():
        print(f"| {name} |", " | ".join(interval(figures["ships"]["by_file"][file][END]) for file in files), "|")


def priced(name: str) -> LatencyProfile:
    return LatencyProfile.load(Path(name)) if name.endswith(".json") else LatencyProfile.what_if(float(name))


def measured(log: Path, folder: Path, profile: LatencyProfile) -> dict[str, Any]:
    """Fit and distil under one profile; metrics.json of the value model and of what ships, and the fit's speedups."""
    path = folder / "figures.json"
    if not path.exists():
        fitted = fit_value(log, profile, folder)
        model = json.loads((folder / "metrics.json").read_text())
        report = distill(folder, folder / "scheduler.json")
        print(report["summary"], flush=True)
        path.write_text(json.dumps({
            "speedups": {name: row["speedup"] for name, row in fitted["cross_validated"].items() if "speedup" in row},
            "model": model,
            "ships": json.loads((folder / "metrics.json").read_text()),
            "students": report["over_best_mask"],
        }))  # fmt: skip
    return json.loads(path.read_text())


def interval(figure: dict[str, Any]) -> str:
    low, high = figure["interval"]
    return f"{figure['value']:+.1%} ({low:+.1%} .. {high:+.1%})"


if __name__ == "__main__":
    typer.run(main)
