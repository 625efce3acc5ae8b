"""What keeping the order of attention's sums costs a forward, against a forward of the same model that keeps none.

    python benchmarks/order_cost.py [--dtype bfloat16] [--context 250] [MODEL...]

A row a model and size of tree: medians in ms, and the ratio of runs in pairs, with its 10th and 90th percentile. In
float32, which needs no order, it is kept all the same: where 16 bits are emulated, their products hide everything else.
"""

import argparse
import random
from statistics import median, quantiles
from time import perf_counter

import torch

from treegraft.runtime.forward import TreeForward
from treegraft.runtime.models import Model, load_model
from treegraft.runtime.tree import Paths

SIZES, PAIRS = (1, 4, 16, 25), 15
WIDTH, CHILDREN = 4, 3  # of the trees


def filled(model: Model, text: list[int], ordered: bool) -> TreeForward:
    """A forward of `model` that keeps the order or keeps none, after `text`."""
    forward = TreeForward(model)
    forward.ordered = ordered
    forward(text[:-1], Paths(text[-1], text[:-1], 1), [0])
    forward.commit([0])
    return forward


def tree(size: int) -> tuple[Paths, list[int]]:
    """A tree of `size` nodes, some WIDTH wide, and its nodes."""
    paths, nodes, frontier = Paths(7, [], 1), [0], [0]
    while len(nodes) < size:
        grown = [paths.child(node, 11 + child) for node in frontier for child in range(CHILDREN)][: size - len(nodes)]
        nodes, frontier = nodes + grown, grown[:WIDTH]
    return paths, nodes


def ms(forward: TreeForward, text: list[int], size: int) -> float:
    paths, nodes = tree(size)
    start = perf_counter()
    forward(text, paths, nodes)[-1, -1].item()
    taken = (perf_counter() - start) * 1e3
    forward.rewind(len(text))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("models", nargs="*", default=["default", "default-medium"], metavar="MODEL")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--context", type=int, default=250, help="tokens in the cache")
    asked = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, {asked.dtype}, {asked.context} tokens of context")
    for name in asked.models:
        model = load_model(name, dtype=asked.dtype)
        text = random.Random(0).choices(range(100, 1000), k=asked.context)
        free, ordered = (filled(model, text, kept) for kept in (False, True))
        for size in SIZES:
            ms(free, text, size), ms(ordered, text, size)
            pairs = [(ms(free, text, size), ms(ordered, text, size)) for _ in range(PAIRS)]
            tenths = quantiles([with_order / without for without, with_order in pairs], n=10)
            without, with_order = (median(side) for side in zip(*pairs))
            print(f"{name:16} {size:3} nodes: {without:6.1f} ms, ordered {with_order:6.1f} ms, ratio {tenths[4]:.2f} "
                  f"({tenths[0]:.2f} .. {tenths[8]:.2f})", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
