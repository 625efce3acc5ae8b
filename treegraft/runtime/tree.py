"""The draft tree of one round, and the paths that forks of that round share."""

from dataclasses import dataclass, field


class Paths:
    """Token paths below the root, each with one id; path 0 is the root.

    A drafter's answer depends on the path alone, so it is kept by path id and serves every fork of a round.
    `tails[i]` are the last `tail_length` tokens of the committed text and path i: what an n-gram matcher looks up.
    """

    def __init__(self, root: int, committed: list[int], tail_length: int):
        self.tail_length = tail_length
        self.parents = [-1]
        self.tokens = [root]
        self.depths = [0]
        self.tails = [tuple([*committed[-tail_length:], root][-tail_length:])]
        self._child: dict[tuple[int, int], int] = {}

    def child(self, path: int, token: int) -> int:
        """The id of `path` extended by `token`."""
        key = (path, token)
        found = self._child.get(key)
        if found is None:
            found = self._child[key] = len(self.tokens)
            self.parents.append(path)
            self.tokens.append(token)
            self.depths.append(self.depths[path] + 1)
            self.tails.append((self.tails[path] + (token,))[-self.tail_length :])
        return found


@dataclass
class DraftTree:
    """Nodes in order of creation, so that a parent precedes its children; node 0 is the root (spec section 2).

    log_p is the log-probability of a node's token after its parent's prefix, log_s the sum of log_p over the path.
    `visited` nodes entered the medium drafter's candidate pool; of `processed` nodes it holds logits, and their
    children carry its probabilities. `new` is N_k, the nodes that the previous step attached.
    """

    path: list[int] = field(default_factory=lambda: [0])
    parent: list[int] = field(default_factory=lambda: [-1])
    token: list[int] = field(default_factory=lambda: [-1])
    depth: list[int] = field(default_factory=lambda: [0])
    log_p: list[float] = field(default_factory=lambda: [0.0])
    log_s: list[float] = field(default_factory=lambda: [0.0])
    visited: list[bool] = field(default_factory=lambda: [False])
    processed: list[bool] = field(default_factory=lambda: [False])
    children: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    new: list[int] = field(default_factory=lambda: [0])
    proposers: list[str] = field(default_factory=lambda: ["root"])

    def __len__(self) -> int:
        return len(self.token)

    def fork(self) -> "DraftTree":
        """A copy that can grow apart; the columns hold immutable values, so copying the lists is enough."""
        return DraftTree(**{name: column.copy() for name, column in vars(self).items()})

    def rank(self, node: int) -> tuple[float, int, int]:
        """The sort key of the total order (-s, depth, creation)."""
        return (-self.log_s[node], self.depth[node], node)

    def top(self, nodes: list[int], count: int) -> list[int]:
        """The first `count` of `nodes` in the total order."""
        return sorted(nodes, key=self.rank)[:count]

    def find_child(self, node: int, token: int) -> int | None:
        for child in self.children[node]:
            if self.token[child] == token:
                return child
        return None

    def add(self, node: int, token: int, log_p: float, path: int, proposer: str) -> int:
        """Attach a new child; returns its index."""
        child = len(self.token)
        self.path.append(path)
        self.parent.append(node)
        self.token.append(token)
        self.depth.append(self.depth[node] + 1)
        self.log_p.append(log_p)
        self.log_s.append(self.log_s[node] + log_p)
        self.visited.append(False)
        self.processed.append(False)
        self.children.append(())
        self.children[node] += (child,)
        self.proposers.append(proposer)
        return child

    def rescore(self) -> None:
        """Recompute every log_s from the log_p along its path."""
        for node in range(1, len(self)):
            self.log_s[node] = self.log_s[self.parent[node]] + self.log_p[node]

    def pool(self) -> list[int]:
        """V \\ P: the nodes that a medium step would choose its frontier from."""
        return [node for node, visited in enumerate(self.visited) if not visited]

    def ordered(self, budget: int) -> list[int]:
        """The first `budget` nodes beside the root in the total order; any prefix is closed under ancestors."""
        return self.top(list(range(1, len(self))), budget)
