"""What one decision costs, in one process and on the same rows: ours, and what else could take it.

    python benchmarks/decision.py scheduler.json

Rows and tree states are the artifact's test vectors. Each figure is the least mean of many short runs, in microseconds:
a shared machine only ever adds time. The models are fitted to these rows' own margins or decisions.
"""

import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from copy import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import onnxruntime
from sklearn.tree import DecisionTreeRegressor

from treegraft.distill.export import to_onnx
from treegraft.runtime.scheduler import TreeModel, load_artifact
from treegraft.runtime.signals import RELEASE, Reading, compute
from treegraft.runtime.verify import state_of

RUNS, LAYERS = 40, (17, 64, 32, 1)


def least_us(work: Callable[[int], object], rows: int, seconds: float = 0.03) -> float:
    """The least mean time of work(row) over all rows, of RUNS runs of about `seconds`."""
    least, times = float("inf"), 1
    for _ in range(RUNS):
        start = time.perf_counter()
        for _ in range(times):
            for row in range(rows):
                work(row)
        taken = time.perf_counter() - start
        least, times = min(least, taken / (times * rows)), max(1, int(times * seconds / max(taken, 1e-9)))
    return least * 1e6


def perceptron(sizes: tuple[int, ...]) -> Callable[[list[float]], float]:
    """A perceptron in plain Python of random weights, rectified: what the paper's release runs."""
    dice = random.Random(0)
    layers = [
        ([[dice.gauss(0, 0.3) for _ in range(wide)] for _ in range(deep)], [0.0] * deep)
        for wide, deep in pairwise(sizes)
    ]

    def run(values: list[float]) -> float:
        for weights, bias in layers:
            values = [max(0.0, sum(w * v for w, v in zip(row, values)) + b) for row, b in zip(weights, bias)]
        return values[0]

    return run


def main(path: Path) -> None:
    artifact = load_artifact(path)
    vectors, reads, width = artifact.vectors, artifact.reads, artifact.drafting["width"]
    steps = [v["state"]["step"] for v in vectors]
    rows = [{name: v["signals"][name] for name in reads} for v in vectors]
    x = np.array([list(row.values()) for row in rows], dtype=float)
    tree = artifact.schedule if isinstance(artifact.schedule, TreeModel) else None
    y = np.array([tree.margin(row) if tree else float(v["invoke"]) for row, v in zip(rows, vectors)])
    settings: dict[str, Any] = {"min_child_samples": 2, "verbose": -1, "n_jobs": 1}
    boosted = lightgbm.LGBMRegressor(n_estimators=100, **settings).fit(x, y).booster_
    single = DecisionTreeRegressor(max_leaf_nodes=64).fit(x, y)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(to_onnx(artifact).SerializeToString(), options)
    network = perceptron(LAYERS)
    padded = [[*row.tolist(), *[0.0] * LAYERS[0]][: LAYERS[0]] for row in x]
    known = [state_of(v["state"], width) for v in vectors]

    def reading(row: int) -> Reading:
        """As a decoder makes it before every step; the tree is there already."""
        state = known[row]
        return Reading(state, state.step, state.mask, state.lag)

    def every(names: Sequence[str], row: int) -> dict[str, Any]:
        return compute(names, copy(known[row]))

    contenders: dict[str, Callable[[int], object]] = {
        "decision, signals given": lambda i: artifact.decide(steps[i], 0, rows[i]),
        "signals on the way and decision": lambda i: artifact.decide(steps[i], 0, reading(i)),
        "all its signals and decision": lambda i: artifact.decide(steps[i], 0, every(reads, i)),
        "the release's six signals": lambda i: every(RELEASE, i),
        "perceptron 17-64-32-1, plain Python": lambda i: network(padded[i]),
        "onnxruntime, one row": lambda i: session.run(None, {"step": [steps[i]], "signals": x[i : i + 1]}),
        "LightGBM predict, 100 trees, one row": lambda i: boosted.predict(x[i : i + 1]),
        "scikit-learn tree predict, one row": lambda i: single.predict(x[i : i + 1]),
    }
    nodes = sum(len(v["state"]["parent"]) for v in vectors) / len(vectors)
    print(f"{path.name}: {len(reads)} signals, {len(rows)} rows, trees of {nodes:.0f} nodes on average")
    base = None
    for name, work in contenders.items():
        us = least_us(work, len(rows))
        base = base or us
        print(f"{name:38} {us:10.2f} us {us / base:10.1f} times the decision")
    imported = (
        "import time; t = time.perf_counter(); import treegraft.runtime.scheduler; print(time.perf_counter() - t)"
    )
    runs = [subprocess.run([sys.executable, "-c", imported], capture_output=True, text=True) for _ in range(10)]
    least = min(float(run.stdout) for run in runs) * 1e3
    print(f"import treegraft.runtime.scheduler: {least:.1f} ms of processor time, least of 10")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
