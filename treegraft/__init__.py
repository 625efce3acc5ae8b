"""TreeGraft: learns when a tree-based speculative decoder should call its dearer drafter."""

__version__ = "0.1.0"
