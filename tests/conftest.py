from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from gathered import gather
from tiny import ARCHITECTURES, make_pair
from transformers.utils import logging

from treegraft.runtime import models
from treegraft.runtime.models import Model

torch.set_num_threads(1)
logging.disable_progress_bar()


@pytest.fixture(scope="session", autouse=True)
def float32_on_any_machine() -> Iterator[None]:
    """Transformers' `generate` is the reference of most tests, up to float ties, which only float32 makes rare."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "native_dtype", lambda device: "float32")
        yield


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Model, Model]]:
    """pair(architecture): its tiny target and medium drafter, made once a session. Tests must leave them unchanged."""
    made: dict[str, tuple[Model, Model]] = {}

    def get(kind: str) -> tuple[Model, Model]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = make_pair(folder, kind, seed=10 * ARCHITECTURES.index(kind))
        return made[kind]

    return get


@pytest.fixture(scope="session")
def whole(pair, tmp_path_factory: pytest.TempPathFactory) -> Path:  # type: ignore[no-untyped-def]
    """An undisturbed log of 8 prompts. Tests must leave it unchanged."""
    folder = tmp_path_factory.mktemp("whole")
    gather(pair, folder, 8)
    return folder
