"""Converted models are kept where their user means them to be, for whom the umask says, and whole."""

import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from gguf_file import tiny_llama, write_gguf
from tiny import config, save_lm

from treegraft.runtime.converted import cache_folder
from treegraft.runtime.models import ModelError, load_model

NOBODY = 65534


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user may enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@contextmanager
def without_rights() -> Iterator[None]:
    """As a user whom permissions concern: for root, nobody."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize(("umask", "folder", "file"), [(0o022, 0o755, 0o644), (0o007, 0o770, 0o660)])
def test_the_umask_says_who_may_read_a_converted_model(
    tmp_path: Path, monkeypatch, umask: int, folder: int, file: int
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("TREEGRAFT_CACHE", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    before = os.umask(umask)
    try:
        made = Path(load_model(str(path)).lm.name_or_path)
    finally:
        os.umask(before)
    assert made.stat().st_mode & 0o777 == folder
    assert {found.name: found.stat().st_mode & 0o777 for found in made.iterdir()} == {
        found.name: file for found in made.iterdir()
    }


def test_a_second_user_reads_what_the_first_converted(shared: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("TREEGRAFT_CACHE", str(shared / "cache"))
    path = write_gguf(shared / "tiny.gguf", tiny_llama())
    first = load_model(str(path))
    with without_rights():
        assert load_model(str(path)).fingerprint == first.fingerprint


@pytest.mark.parametrize("closed", [".", "config.json", "model.safetensors"])
def test_a_converted_model_that_may_not_be_read_is_named_with_the_way_out(
    shared: Path, monkeypatch, closed: str
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("TREEGRAFT_CACHE", str(shared / "cache"))
    path = write_gguf(shared / "tiny.gguf", tiny_llama())
    made = Path(load_model(str(path)).lm.name_or_path)
    (made / closed).chmod(0)
    with (
        without_rights(),
        pytest.raises(
            ModelError, match=rf"Permission denied: '{made / closed}'.*chmod -R a\+rX.*or set TREEGRAFT_CACHE"
        ),
    ):
        load_model(str(path))


def test_a_model_folder_that_may_not_be_read_is_named(shared: Path) -> None:
    folder = save_lm(shared / "model", config("llama"), seed=0)
    for path in folder.iterdir():
        path.chmod(0)
    with without_rights(), pytest.raises(ModelError, match=rf"model '{folder}': .*denied: '{folder}/.*chmod -R a\+rX"):
        load_model(str(folder))


def test_a_gguf_file_that_may_not_be_read_is_named(shared: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("TREEGRAFT_CACHE", str(shared / "cache"))
    (shared / "cache").mkdir()
    (shared / "cache").chmod(0o777)
    path = write_gguf(shared / "tiny.gguf", tiny_llama())
    path.chmod(0)
    with without_rights(), pytest.raises(ModelError, match=rf"Permission denied: '{path}'"):
        load_model(str(path))


def test_a_cache_that_may_not_be_written_is_named_with_the_way_out(shared: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("TREEGRAFT_CACHE", str(shared / "cache"))
    path = write_gguf(shared / "tiny.gguf", tiny_llama())
    shared.chmod(0o555)
    with (
        without_rights(),
        pytest.raises(ModelError, match=rf"models, {shared}/cache, .*Permission denied.*TREEGRAFT_C"),
    ):
        load_model(str(path))


@pytest.mark.parametrize("split", [0, 5], ids=["one file", "shards"])
def test_a_full_disk_is_named_and_leaves_nothing_behind(tmp_path: Path, monkeypatch, split: int) -> None:  # type: ignore[no-untyped-def]
    cache = tmp_path / "cache"
    monkeypatch.setenv("TREEGRAFT_CACHE", str(cache))
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), split=split)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    usual = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # bytes a file: the weights have more
    try:
        with pytest.raises(
            ModelError, match=rf"models, {cache}, cannot be used \(.*free space, or set TREEGRAFT_CACHE"
        ):
            load_model(str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, usual)
    assert list(cache.iterdir()) == []
    assert load_model(str(path)).lm.config.num_hidden_layers == 2


def test_two_that_convert_at_once_both_load(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    cache = tmp_path / "cache"
    monkeypatch.setenv("TREEGRAFT_CACHE", str(cache))
    lm = tiny_llama()
    path = write_gguf(tmp_path / "tiny.gguf", lm, split=5)
    command = [sys.executable, "-c", f"from treegraft import load_model; print(load_model({str(path)!r}).fingerprint)"]
    with ThreadPoolExecutor(2) as both:
        done = list(both.map(lambda _: subprocess.run(command, capture_output=True, text=True), range(2)))
    assert [one.returncode for one in done] == [0, 0], done
    assert len(list(cache.iterdir())) == 1
    whole = load_model(str(path))
    assert {one.stdout.strip() for one in done} == {whole.fingerprint}
    torch.testing.assert_close(whole.lm(torch.arange(9)[None]).logits, lm(torch.arange(9)[None]).logits)


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_an_xdg_cache_home_that_is_no_absolute_path_counts_as_unset(monkeypatch, tmp_path: Path, value: str) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.delenv("TREEGRAFT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "treegraft"


def test_a_tilde_in_treegraft_cache_is_the_home_directory(monkeypatch, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TREEGRAFT_CACHE", "~/models")
    assert cache_folder() == tmp_path / "models"


def test_a_user_without_a_home_is_told_to_name_a_folder(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.delenv("TREEGRAFT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)  # a container's: the password file knows no such user
    with pytest.raises(ModelError, match="no home directory; set TREEGRAFT_CACHE"):
        load_model("default")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cache_folder() == Path("/var/cache/treegraft")
