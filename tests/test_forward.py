"""A tree forward gives every node the logits that its root-to-node path would have on its own (spec section 3)."""

import random

import pytest
import torch
from tiny import ARCHITECTURES, VOCABULARY

from treegraft.runtime import attention as attending
from treegraft.runtime import static
from treegraft.runtime.forward import GROWTH, LONG_LAG, TreeForward
from treegraft.runtime.models import Model
from treegraft.runtime.tree import Paths


@pytest.fixture(params=["as they come", "padded"])
def shapes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards of the shapes that come, and of the few that a CUDA graph can hold."""
    if request.param == "padded":
        monkeypatch.setattr(static, "DEVICES", ("cpu",))


def words(paths: Paths, path: int) -> list[int]:
    """The tokens from the root to a path's end."""
    found = []
    while path >= 0:
        found.append(paths.tokens[path])
        path = paths.parents[path]
    return found[::-1]


def assert_as_alone(model: Model, committed: list[int], paths: Paths, nodes: list[int], logits: torch.Tensor) -> None:
    assert logits.shape == (len(nodes), VOCABULARY)
    for node, row in zip(nodes, logits):
        with torch.inference_mode():
            alone = model.lm(torch.tensor([committed + words(paths, node)]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(row, alone, atol=1e-4, rtol=0)


def random_tree(rng: random.Random, committed: list[int], size: int) -> Paths:
    """A root after `committed` and up to `size` paths below it, siblings and cousins with equal tokens among them."""
    paths = Paths(rng.randrange(VOCABULARY), committed, 6)
    for _ in range(size):
        paths.child(rng.randrange(len(paths.tokens)), rng.randrange(6))
    return paths


def text(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(length)]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_nodes_have_the_logits_of_their_own_paths_round_after_round(shapes, pair, kind) -> None:  # type: ignore[no-untyped-def]
    model, _ = pair(kind)
    rng = random.Random(kind)
    forward = TreeForward(model)
    committed = text(rng, 9)
    for _ in range(4):
        paths = random_tree(rng, committed, 10)
        nodes = list(range(len(paths.tokens)))
        assert_as_alone(model, committed, paths, nodes, forward(committed, paths, nodes))
        # Commit any branch; its end becomes the next root's context.
        branch = [nodes[-1]]
        while branch[0]:
            branch.insert(0, paths.parents[branch[0]])
        forward.commit(branch)
        committed = committed + [paths.tokens[node] for node in branch]
        assert forward.seen == len(committed)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_tree_may_be_processed_in_several_calls(shapes, pair, kind) -> None:  # type: ignore[no-untyped-def]
    model, _ = pair(kind)
    rng = random.Random(kind)
    forward = TreeForward(model)
    committed = text(rng, 5)
    for _ in range(2):
        paths = random_tree(rng, committed, 12)
        count = len(paths.tokens)
        for part in ([0], list(range(1, count // 2)), [count // 2], list(range(count // 2 + 1, count))):
            assert_as_alone(model, committed, paths, part, forward(committed, paths, part))
        child = next(node for node in range(count - 1, 0, -1) if paths.parents[node] == 0)
        forward.commit([0, child])
        committed = [*committed, paths.tokens[0], paths.tokens[child]]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_model_that_lags_catches_up_in_its_next_call(shapes, pair, kind) -> None:  # type: ignore[no-untyped-def]
    model, _ = pair(kind)
    rng = random.Random(kind)
    forward = TreeForward(model)
    committed = text(rng, 6)
    paths = random_tree(rng, committed, 6)
    forward(committed, paths, [0, 1])
    # Of the committed branch it processed the root and the first node only.
    deeper = paths.child(paths.child(1, 190), 191)
    forward.commit([0, 1, paths.parents[deeper], deeper])
    assert forward.seen == len(committed) + 2
    committed = committed + words(paths, deeper)
    # A round without a call, and then one with a lag of 2 + 1 + 3 tokens.
    forward.commit([0])
    committed = committed + text(rng, 4)
    assert len(committed) - forward.seen == 6
    paths = random_tree(rng, committed, 8)
    nodes = list(range(len(paths.tokens)))
    assert_as_alone(model, committed, paths, nodes, forward(committed, paths, nodes))
    forward.commit([0])
    # A lag and the root alone: plain causal attention.
    committed = [*committed, paths.tokens[0], *text(rng, 3)]
    paths = Paths(5, committed, 6)
    assert_as_alone(model, committed, paths, [0], forward(committed, paths, [0]))


def test_a_root_without_context_is_a_text_of_one_token(shapes, pair) -> None:  # type: ignore[no-untyped-def]
    model, _ = pair("llama")
    forward = TreeForward(model)
    paths = random_tree(random.Random(1), [], 5)
    nodes = list(range(len(paths.tokens)))
    assert_as_alone(model, [], paths, nodes, forward([], paths, nodes))


def test_the_cache_outgrows_its_first_block(pair) -> None:  # type: ignore[no-untyped-def]
    model, _ = pair("llama")
    rng = random.Random(3)
    forward = TreeForward(model)
    committed = text(rng, 9)
    sizes = set()
    for _ in range(6):
        paths = random_tree(rng, committed, 12)
        nodes = list(range(len(paths.tokens)))
        assert_as_alone(model, committed, paths, nodes, forward(committed, paths, nodes))
        forward.commit([0])
        size = forward.cache.layers[0].keys.shape[-2]
        assert size <= len(committed) + len(nodes) + GROWTH
        sizes.add(size)
        committed = [*committed, paths.tokens[0], *text(rng, GROWTH // 2)]
    assert len(sizes) > 2


def test_what_is_not_committed_leaves_no_trace(shapes, pair) -> None:  # type: ignore[no-untyped-def]
    model, _ = pair("qwen3")
    rng = random.Random(4)
    committed = text(rng, 7)
    used, fresh = TreeForward(model), TreeForward(model)
    paths = random_tree(rng, committed, 10)
    used(committed, paths, list(range(len(paths.tokens))))
    used.commit([0])
    fresh(committed, paths, [0])
    fresh.commit([0])
    committed = [*committed, paths.tokens[0]]
    paths = random_tree(rng, committed, 10)
    nodes = list(range(len(paths.tokens)))
    torch.testing.assert_close(used(committed, paths, nodes), fresh(committed, paths, nodes), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_long_lag_is_caught_up_before_a_branching_call(shapes, pair, kind) -> None:  # type: ignore[no-untyped-def]
    model, _ = pair(kind)
    rng = random.Random(kind)
    forward = TreeForward(model)
    committed = text(rng, LONG_LAG + 5)
    for more in (LONG_LAG + 1, LONG_LAG, 0):  # with nothing in the cache, with something, and up to the limit
        paths = random_tree(rng, committed, 8)
        nodes = list(range(len(paths.tokens)))
        assert_as_alone(model, committed, paths, nodes, forward(committed, paths, nodes))
        forward.commit([0])
        committed = [*committed, paths.tokens[0], *text(rng, more)]


def test_the_head_computes_the_rows_that_are_read_and_no_others(pair) -> None:  # type: ignore[no-untyped-def]
    model, _ = pair("llama")
    rng = random.Random(5)
    rows: list[int] = []
    hook = model.lm.get_output_embeddings().register_forward_hook(lambda _, inputs, out: rows.append(out.shape[-2]))
    forward = TreeForward(model)
    committed = text(rng, 100)
    forward(committed, Paths(1, committed, 6), [0])  # a prompt
    forward.commit([0])
    committed = [*committed, 1, *text(rng, LONG_LAG + 9)]
    for lag in (LONG_LAG + 9, 3):
        paths = random_tree(rng, committed, 6)
        assert len(committed) - forward.seen == lag
        forward(committed, paths, [0, 1, 2])
        forward(committed, paths, [3])
        forward.commit([0])
        committed = [*committed, paths.tokens[0], *text(rng, 3)]
    hook.remove()
    assert rows == [1, 3, 1, 3, 1]


def test_a_tree_forward_copies_no_keys_and_leaves_the_models_own_attention(pair, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    model, _ = pair("qwen2")
    queries: list[tuple[int, ...]] = []

    def watch(query: torch.Tensor, key: torch.Tensor, *rest: object, **named: object) -> torch.Tensor:
        queries.append((query.shape[1], query.shape[2], key.shape[1], key.shape[2]))
        return attention(query, key, *rest, **named)

    attention = attending.scaled_dot_product_attention
    monkeypatch.setattr(attending, "scaled_dot_product_attention", watch)
    forward = TreeForward(model)
    committed = text(random.Random(6), 20)
    paths = random_tree(random.Random(6), committed, 5)
    forward(committed, paths, [0, 1, 2])
    # 4 query heads on 2 key heads: two rows for each of 23 tokens, and the cache as it is.
    assert queries == [(2, 46, 2, 23)] * model.lm.config.num_hidden_layers
    assert model.lm.config._attn_implementation == "sdpa"


def test_slots_that_are_in_place_are_not_moved(shapes, pair) -> None:  # type: ignore[no-untyped-def]
    model, _ = pair("llama")
    forward = TreeForward(model)
    committed = text(random.Random(7), 9)
    paths = Paths(3, committed, 6)
    first, second = paths.child(0, 4), paths.child(0, 5)
    forward(committed, paths, [0, first, second])
    before = forward.cache.layers[0].keys[:, :, :12].clone()
    forward.commit([0, first])
    assert forward.seen == 11
    assert torch.equal(forward.cache.layers[0].keys[:, :, :12], before)
    forward.rewind(9)
    forward(committed, paths, [0, first, second])
    forward.commit([0, second])
    assert torch.equal(forward.cache.layers[0].keys[:, :, 10], before[:, :, 11])


def test_a_rewound_cache_continues_another_text(shapes, pair) -> None:  # type: ignore[no-untyped-def]
    model, _ = pair("mistral")
    rng = random.Random(8)
    forward = TreeForward(model)
    committed = text(rng, 30)
    paths = random_tree(rng, committed, 5)
    forward(committed, paths, [0, 1])
    forward.rewind(12)  # in the middle of a round
    assert forward.seen == 12
    committed = [*committed[:12], *text(rng, 4)]
    paths = random_tree(rng, committed, 8)
    nodes = list(range(len(paths.tokens)))
    assert_as_alone(model, committed, paths, nodes, forward(committed, paths, nodes))
