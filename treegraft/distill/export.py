"""Exports of a scheduler for decoders that run no Python: one C99 header, or an ONNX graph."""

from typing import Any

from treegraft.runtime.scheduler import Artifact, Mask, Rules, TreeModel
from treegraft.runtime.signals import SIGNALS

HEADER = """\
/* A treegraft scheduler: whether a drafting step calls the medium drafter. C99, no allocation, thread-safe.
 * Made from the artifact {sha256}
 * by `treegraft export --format c`; docs/artifact.md says what the signals are and how to draft with it.
 */
#ifndef TREEGRAFT_SCHEDULER_H
#define TREEGRAFT_SCHEDULER_H

#include <math.h>

enum {{
    TREEGRAFT_DEPTH = {depth},       /* K, drafting steps a round */
    TREEGRAFT_WIDTH = {width},       /* W, frontier nodes a step */
    TREEGRAFT_CHILDREN = {children}, /* m, next tokens a frontier node */
    TREEGRAFT_BUDGET = {budget},     /* B, verification nodes beside the root */
    TREEGRAFT_POOL = {pool},         /* C, tree nodes a medium call may process; -1: no limit */
    TREEGRAFT_CALLS = {medium_calls},        /* medium steps a round; -1: no limit */
    TREEGRAFT_FALLBACK = {fallback}     /* a mask, bit 0 is step 1, where a signal is not finite */
}};

/* Places in `signals`. */
enum {{
{places}
    TREEGRAFT_SIGNALS /* how many */
}};
{tables}
/* 1 to call the medium drafter before `step` (1 .. TREEGRAFT_DEPTH), else 0. */
static inline int treegraft_call(int step, const double *signals) {{
    for (int i = 0; i < TREEGRAFT_SIGNALS; i++)
        if (!isfinite(signals[i])) return TREEGRAFT_FALLBACK >> (step - 1) & 1;
{body}
}}

#endif
"""

MARGIN = """
/* The gain in expected worth (tokens) of calling; `signals` are finite. */
static inline double treegraft_margin(const double *signals) {{
    static const short feature[] = {{{feature}}};
    static const short left[] = {{{left}}};
    static const short right[] = {{{right}}};
    static const double threshold[] = {{{threshold}}};
    static const double value[] = {{{value}}};
    int node = 0;
    while (feature[node] >= 0) node = signals[feature[node]] <= threshold[node] ? left[node] : right[node];
    return value[node];
}}
"""


def to_c(artifact: Artifact) -> str:
    """The schedule as one C99 header."""
    schedule, settings = artifact.schedule, artifact.drafting
    tables = ""
    if isinstance(schedule, Mask):
        body = f"    return {schedule.bits} >> (step - 1) & 1;"
    elif isinstance(schedule, Rules):
        lines = []
        for rule in schedule.rules:
            conditions = "".join(
                f" && signals[{_place(name)}] {operator} {threshold!r}" for name, operator, threshold in rule.conditions
            )
            lines.append(f"    if (step == {rule.step}{conditions}) return 1;")
        body = "\n".join([*lines, "    return 0;"])
    else:
        columns = ("feature", "left", "right", "threshold", "value")
        tables = MARGIN.format(**{name: ", ".join(map(repr, getattr(schedule, name))) for name in columns})
        # The step is among the signals where a tree reads it.
        body = "    return treegraft_margin(signals) > 0;"
    return HEADER.format(
        sha256=artifact.sha256, fallback=artifact.fallback, tables=tables, body=body,
        places="\n".join(f"    {_place(name)}, /* {SIGNALS[name].definition} */" for name in schedule.reads),
        **{name: -1 if value is None else value for name, value in settings.items()},
    )  # fmt: skip


def _place(name: str) -> str:
    return f"TREEGRAFT_{name.upper()}"


def to_onnx(artifact: Artifact) -> Any:
    """The schedule as an ONNX model (onnx.ModelProto), in float64 as the artifact itself.

    Inputs: `step` (n,) int64 and `signals` (n, signals) float64, in the artifact's order. Outputs: `call` (n,) bool,
    and a tree's `margin` (n,) float64. A rule, or a leaf, is a row of conditions that must all hold.
    """
    import numpy as np
    from onnx import TensorProto, checker, helper, numpy_helper

    rows = _rows(artifact)
    conditions = [condition for row, _ in rows for condition in row]
    belongs = np.zeros((len(conditions), len(rows)))
    belongs[np.arange(len(conditions)), np.repeat(np.arange(len(rows)), [len(row) for row, _ in rows])] = 1
    depth, reads = artifact.drafting["depth"], artifact.reads
    constants = {
        "columns": np.array([column for column, _, _ in conditions]),
        "low": np.array([low for _, low, _ in conditions]),
        "thresholds": np.array([threshold for _, _, threshold in conditions]),
        "belongs": belongs,
        "needed": belongs.sum(axis=0),
        "values": np.array([value for _, value in rows]),
        "greatest": np.array(np.finfo(np.float64).max),
        "zero": np.array(0.0),
        "last_axis": np.array([1]),
        "fallbacks": np.array([False, *(bool(artifact.fallback >> k & 1) for k in range(depth))]),
    }
    tree = isinstance(artifact.schedule, TreeModel)
    graph: list[tuple[str, list[str], str, dict[str, Any]]] = [
        ("Cast", ["step"], "step_double", {"to": TensorProto.DOUBLE}),
        ("Unsqueeze", ["step_double", "last_axis"], "step_column", {}),
        ("Concat", ["step_column", "signals"], "all", {"axis": 1}),
        ("Gather", ["all", "columns"], "compared", {"axis": 1}),
        ("LessOrEqual", ["compared", "thresholds"], "is_low", {}),
        ("Equal", ["is_low", "low"], "holds", {}),
        ("Cast", ["holds"], "holds_double", {"to": TensorProto.DOUBLE}),
        ("MatMul", ["holds_double", "belongs"], "holding", {}),
        ("Equal", ["holding", "needed"], "row_holds", {}),
        ("Cast", ["row_holds"], "row_holds_double", {"to": TensorProto.DOUBLE}),
        ("MatMul", ["row_holds_double", "values"], "margin", {}),
        ("Greater", ["margin", "zero"], "decided", {}),
        ("Abs", ["all"], "absolute", {}),
        ("LessOrEqual", ["absolute", "greatest"], "finite", {}),
        ("Cast", ["finite"], "finite_int", {"to": TensorProto.INT32}),
        ("ReduceMin", ["finite_int"], "all_finite_int", {"axes": [1], "keepdims": 0}),
        ("Cast", ["all_finite_int"], "all_finite", {"to": TensorProto.BOOL}),
        ("Gather", ["fallbacks", "step"], "fallback", {}),
        ("And", ["all_finite", "decided"], "chosen", {}),
        ("Not", ["all_finite"], "surprised", {}),
        ("And", ["surprised", "fallback"], "fallen_back", {}),
        ("Or", ["chosen", "fallen_back"], "call", {}),
    ]
    outputs = [helper.make_tensor_value_info("call", TensorProto.BOOL, ["n"])]
    if tree:
        outputs.append(helper.make_tensor_value_info("margin", TensorProto.DOUBLE, ["n"]))
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node(kind, inputs, [output], **settings) for kind, inputs, output, settings in graph],
            "treegraft",
            [
                helper.make_tensor_value_info("step", TensorProto.INT64, ["n"]),
                helper.make_tensor_value_info("signals", TensorProto.DOUBLE, ["n", len(reads)]),
            ],
            outputs,
            [numpy_helper.from_array(value, name) for name, value in constants.items()],
        ),
        producer_name="treegraft",
        ir_version=8,
        opset_imports=[helper.make_opsetid("", 17)],
    )
    helper.set_model_props(model, {"artifact": artifact.sha256, "signals": ",".join(reads)})
    checker.check_model(model, full_check=True)
    return model


Condition = tuple[int, bool, float]  # column (0: the step), whether to be at most the threshold, threshold


def _rows(artifact: Artifact) -> list[tuple[list[Condition], float]]:
    """The schedule as rows of conditions; the values of the rows that hold add up to its margin (of rules: a count)."""
    schedule, reads = artifact.schedule, artifact.reads
    if isinstance(schedule, TreeModel):
        found, open_nodes = [], [(0, [(0, False, 0.0)])]  # the step is above 0: always
        while open_nodes:
            node, path = open_nodes.pop()
            if schedule.feature[node] < 0:
                found.append((path, schedule.value[node]))
                continue
            column, threshold = schedule.feature[node] + 1, schedule.threshold[node]
            open_nodes.append((schedule.left[node], [*path, (column, True, threshold)]))
            open_nodes.append((schedule.right[node], [*path, (column, False, threshold)]))
        return found
    if isinstance(schedule, Rules):
        rules = [
            (rule.step, [(reads.index(name) + 1, operator == "<=", limit) for name, operator, limit in rule.conditions])
            for rule in schedule.rules
        ]
    else:
        rules = [(k, []) for k in range(1, artifact.drafting["depth"] + 1) if schedule.bits >> (k - 1) & 1]
    never: list[tuple[list[Condition], float]] = [([(0, True, 0.0)], 1.0)]  # so that no table is empty
    return never + [([(0, True, step), (0, False, step - 1), *conditions], 1.0) for step, conditions in rules]
