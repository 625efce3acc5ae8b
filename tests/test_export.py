"""Exports decide as the artifact does: C99 built by the strictest compiler, ONNX run by onnxruntime."""

import subprocess
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from artifacts import SCHEDULES, make, write

from treegraft import cli
from treegraft.distill.export import to_c, to_onnx
from treegraft.runtime.scheduler import Artifact, TreeModel

# Reads "step signal ..." lines and prints each decision and, of a tree, its margin.
MAIN = """
#include <stdio.h>
#include "scheduler.h"
int main(void) {
    int step;
    double signals[TREEGRAFT_SIGNALS + 1];
    while (scanf("%d", &step) == 1) {
        for (int i = 0; i < TREEGRAFT_SIGNALS; i++) if (scanf("%lf", &signals[i]) != 1) return 1;
        printf("%d %.17g\\n", treegraft_call(step, signals), MARGIN);
    }
    return 0;
}
"""


@pytest.fixture(scope="module", params=SCHEDULES, ids=["mask", "rules", "tree"])
def artifact(request: pytest.FixtureRequest) -> Artifact:
    return make(request.param)


def rows(artifact: Artifact) -> tuple[np.ndarray, np.ndarray, list[bool]]:
    """Steps, signals and decisions: all test vectors, then each again with one signal not finite."""
    step = [v["state"]["step"] for v in artifact.vectors]
    signals = [[float(v["signals"][name]) for name in artifact.reads] for v in artifact.vectors]
    for wrong in (float("nan"), float("inf"), float("-inf")) if artifact.reads else ():
        for index, vector in enumerate(artifact.vectors):
            row = list(signals[index])
            row[index % len(row)] = wrong
            step.append(vector["state"]["step"])
            signals.append(row)
    artifact.fallbacks = 1  # the warning has been given
    decided = [artifact.decide(k, 0, dict(zip(artifact.reads, row))) for k, row in zip(step, signals)]
    assert decided[: len(artifact.vectors)] == [v["invoke"] for v in artifact.vectors]
    return np.array(step), np.array(signals).reshape(len(step), len(artifact.reads)), decided


def test_the_c_header_compiles_without_a_warning_and_agrees_with_every_vector(
    artifact: Artifact, tmp_path: Path
) -> None:
    step, signals, decided = rows(artifact)
    tree = isinstance(artifact.schedule, TreeModel)
    (tmp_path / "scheduler.h").write_text(to_c(artifact))
    (tmp_path / "main.c").write_text(MAIN.replace("MARGIN", "treegraft_margin(signals)" if tree else "0.0"))
    strict = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["cc", *strict, "main.c", "-o", "main"], cwd=tmp_path, check=True)
    lines = "\n".join(f"{k} " + " ".join(map(repr, row)) for k, row in zip(step.tolist(), signals.tolist()))
    ran = subprocess.run([tmp_path / "main"], input=lines, capture_output=True, text=True, check=True)
    said = [line.split() for line in ran.stdout.splitlines()]
    assert [bool(int(call)) for call, _ in said] == decided
    if tree:
        margins = [v["margin"] for v in artifact.vectors]
        assert [float(margin) for _, margin in said[: len(margins)]] == margins


def test_two_files_may_include_the_header(artifact: Artifact, tmp_path: Path) -> None:
    (tmp_path / "scheduler.h").write_text(to_c(artifact))
    (tmp_path / "a.c").write_text('#include "scheduler.h"\n#include "scheduler.h"\nint main(void) { return 0; }\n')
    (tmp_path / "b.c").write_text('#include "scheduler.h"\nint other(void) { return TREEGRAFT_DEPTH; }\n')
    subprocess.run(["cc", "-std=c99", "-Wall", "-Wextra", "-Werror", "a.c", "b.c"], cwd=tmp_path, check=True)


def test_the_onnx_graph_agrees_with_every_vector(artifact: Artifact) -> None:
    step, signals, decided = rows(artifact)
    session = onnxruntime.InferenceSession(to_onnx(artifact).SerializeToString())
    call, *margin = session.run(None, {"step": step, "signals": signals})
    assert call.tolist() == decided
    if isinstance(artifact.schedule, TreeModel):
        assert margin[0][: len(artifact.vectors)].tolist() == [v["margin"] for v in artifact.vectors]
    assert session.get_modelmeta().custom_metadata_map["signals"] == ",".join(artifact.reads)


def test_the_commands_inspect_verify_and_export(artifact: Artifact, tmp_path: Path, capsys) -> None:
    path = write(tmp_path / "scheduler.json", artifact.to_json())

    def run(*words: object) -> str:
        cli.app([str(word) for word in words], standalone_mode=False)
        return capsys.readouterr().out

    assert "calls a round" in run("inspect", path)
    assert f"sound; {len(artifact.vectors)} test vectors agree; sha256 {artifact.sha256}" in run("verify", path)
    run("export", path, "--format", "c", "--out", tmp_path / "c" / "scheduler.h")
    run("export", path, "--format", "onnx", "--out", tmp_path / "scheduler.onnx")
    assert (tmp_path / "c" / "scheduler.h").read_text() == to_c(artifact)
    assert (tmp_path / "scheduler.onnx").read_bytes() == to_onnx(artifact).SerializeToString()
    with pytest.raises(ValueError, match="--format 'rust'"):
        run("export", path, "--format", "rust", "--out", tmp_path / "x")
