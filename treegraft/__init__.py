"""TreeGraft: learns when a tree-based speculative decoder should call its dearer drafter."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treegraft.runtime.decode import Decoded, Drop, Plan, Round
    from treegraft.runtime.decoder import Answer, Decoder
    from treegraft.runtime.drafting import Drafting
    from treegraft.runtime.generate import TreeGraftOutput, generate
    from treegraft.runtime.models import Model, check_pair, load_model
    from treegraft.runtime.scheduler import load_artifact

__version__ = "0.1.0"
__all__ = [
    "Answer", "Decoded", "Decoder", "Drafting", "Drop", "Model", "Plan", "Round", "TreeGraftOutput", "check_pair",
    "generate", "load_artifact", "load_model",
]  # fmt: skip

# Imported when first asked for, so that `import treegraft.runtime.scheduler` loads no torch.
_HOMES = {
    "decode": ("Decoded", "Drop", "Plan", "Round"),
    "decoder": ("Answer", "Decoder"),
    "drafting": ("Drafting",),
    "generate": ("TreeGraftOutput", "generate"),
    "models": ("Model", "check_pair", "load_model"),
    "scheduler": ("load_artifact",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"treegraft.runtime.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
