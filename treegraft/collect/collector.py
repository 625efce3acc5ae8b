"""The one writer of a log: hands prompts to an engine and writes what comes back, a part a prompt, in their order."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import takewhile
from typing import Any, Protocol

from treegraft.collect.positions import Positions
from treegraft.collect.worker import Outcome, Sampling, Settings, Worker
from treegraft.data import log
from treegraft.data.files import Location, listing, location, make_folder
from treegraft.data.prompts import Prompt
from treegraft.runtime.drafting import Drafting
from treegraft.runtime.models import Model


class Engine(Protocol):
    """Where prompts are collected: `Worker` in this process, `ray_engine` on many machines."""

    @property
    def settings(self) -> dict[str, Any]:
        """What a log's manifest says of models and settings."""

    def run(self, prompts: Iterable[Prompt]) -> Iterator[Outcome]:
        """The outcome of every prompt, in their order; a prompt is drawn only when a worker is free for it."""


def collect(
    target: Model,
    medium: Model,
    prompts: list[Prompt],
    folder: str | Location,
    drafting: Drafting,
    sampling: Sampling,
    max_new_tokens: int,
    positions: Positions = Positions(),  # noqa: B008
    **more: Any,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """`collect_with` these models, in this process; `more` goes to it. ValueError for settings that cannot serve."""
    engine = Worker(target, medium, Settings(drafting, sampling, max_new_tokens, positions))
    return collect_with(engine, prompts, folder, **more)


def check_folder(folder: Location) -> None:
    """Raise now what `collect_with` would raise for the folder as such: models may take long to load."""
    try:
        make_folder(folder)
        with log.locked(folder):
            if (folder / log.MANIFEST).exists():
                log.read_manifest(folder)
    except (OSError, ValueError):  # these say what is wrong
        raise
    except Exception as error:  # a store's client has errors of its own
        raise log.LogError(
            f"{folder}: cannot be written ({type(error).__name__}: {error}); check its endpoint, bucket and credentials"
        ) from error


def collect_with(
    engine: Engine,
    prompts: list[Prompt],
    folder: str | Location,
    retry_failed: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Collect `prompts` into `folder`, going on after those that it holds; returns the manifest and what failed.

    A prompt that fails, for whatever reason, goes to failed.jsonl and harms no other; `retry_failed` tries those of the
    log again. `progress` gets finished prompts and all prompts; `stop` is asked before each prompt that is begun.
    Raises LogError where the log was made with other models or settings, was damaged, or cannot be written.
    """
    folder = location(folder)
    make_folder(folder)
    with log.locked(folder):
        manifest = _open(folder, engine.settings, {(prompt.file, prompt.id) for prompt in prompts})
        held = {(p["file"], p["prompt"]): p["sha256"] for p in manifest["parts"]}
        _check_held(folder, prompts, held)
        noted = log.read_failed(folder)
        failed = {key: line for line in noted if (key := (line["file"], line["prompt"])) not in held}
        if len(failed) < len(noted):  # the collector was killed before it could strike one out
            log.write_failed(folder, failed.values())
        if retry_failed:
            for prompt in prompts:
                failed.pop((prompt.file, prompt.id), None)
        known = held | {key: line["sha256"] for key, line in failed.items()}
        wanted = [prompt for prompt in prompts if known.get((prompt.file, prompt.id)) != prompt.sha256()]
        done = len(prompts) - len(wanted)
        progress(done, len(prompts))
        for outcome in engine.run(takewhile(lambda _: not stop(), wanted)):
            _write(folder, manifest, failed, outcome)
            done += 1
            progress(done, len(prompts))
    return manifest, list(failed.values())


def _write(
    folder: Location, manifest: dict[str, Any], failed: dict[tuple[str, str], dict[str, Any]], outcome: Outcome
) -> None:
    """Add a prompt to the log or to failed.jsonl, and to `manifest` or `failed`."""
    prompt = outcome.prompt
    key, keys = (prompt.file, prompt.id), {"file": prompt.file, "prompt": prompt.id, "sha256": prompt.sha256()}
    try:
        if outcome.error is None:
            number = 1 + max((part["number"] for part in manifest["parts"]), default=-1)
            part = log.write_part(folder, number, outcome.tables)
            manifest["parts"].append({"number": number, **keys, "lengths": outcome.lengths, **part})
            log.write_manifest(folder, manifest)
            failed.pop(key, None)
        else:
            failed[key] = {**keys, "error": outcome.error}
        log.write_failed(folder, failed.values())
    except OSError as error:
        written = f"{type(error).__name__}: {error}"
        _note_unwritten(folder, {**failed, key: {**keys, "error": written}})
        raise log.LogError(
            f"{folder}: {prompt.file}/{prompt.id} could not be written ({error}); the earlier prompts are safe: make "
            "room, then the same command with --retry-failed goes on"
        ) from error


def _note_unwritten(folder: Location, failed: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Note a prompt that could not be written, in the room that deleting its files leaves."""
    log.tidy(folder, log.read_manifest(folder))
    with suppress(OSError):  # without the note the prompt is tried again all the same
        log.write_failed(folder, failed.values())


def _check_held(folder: Location, prompts: list[Prompt], held: dict[tuple[str, str], str]) -> None:
    """Raise LogError where a prompt that the log holds is asked for with another text."""
    for prompt in prompts:
        if held.get((prompt.file, prompt.id), prompt.sha256()) != prompt.sha256():
            raise log.LogError(
                f"{folder} holds another prompt {prompt.file}/{prompt.id} than the one given: the file was edited, "
                "or two files share a name; collect into another --out"
            )


def _open(folder: Location, settings: dict[str, Any], asked: set[tuple[str, str]]) -> dict[str, Any]:
    """The folder's manifest, new or one made with the same settings, its parts checked.

    A part with a file gone is dropped if its prompt is among those `asked` for, and so collected again.
    """
    files = listing(folder)
    if log.MANIFEST not in files:
        if parts := log.part_files(files):
            raise log.LogError(f"{folder}: holds {parts[0]} but no {log.MANIFEST}; use another --out")
        manifest = {**settings, "parts": []}
        log.write_manifest(folder, manifest)
        return manifest
    manifest = log.read_manifest(folder)
    if told := log.difference(manifest, settings):
        raise log.LogError(
            f"{folder} was collected with {told}; use the same models and settings to go on, or another --out"
        )
    whole = [
        part for part in manifest["parts"]
        if (part["file"], part["prompt"]) not in asked or all(part[table]["file"] in files for table in log.TABLES)
    ]  # fmt: skip
    log.check_parts(folder, whole)
    named = {part["leaves"]["file"] for part in manifest["parts"]}
    unnamed = [name for name in log.part_files(files, ["leaves"]) if name not in named]
    if len(unnamed) > 1:  # a killed collector leaves one at most
        raise log.LogError(
            f"{folder}: its {log.MANIFEST} is older than its parts ({', '.join(unnamed[:3])} are not named); put the "
            "newer one back, or delete those parts"
        )
    log.tidy(folder, {"parts": whole})
    if whole != manifest["parts"]:
        manifest["parts"] = whole
        log.write_manifest(folder, manifest)
    return manifest
