"""Join logs that were collected apart, such as the shards of a batch queue."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treegraft.data import log
from treegraft.data.files import Location, location, make_folder, names


@dataclass(frozen=True)
class Merged:
    """What a merge made: prompts, how many more were dropped as duplicates, and those that failed in every log."""

    prompts: int
    duplicates: int
    failed: int


def merge(out: str | Location, logs: Sequence[str | Location]) -> Merged:
    """Join `logs` in the order given into the new folder `out`; a prompt that several hold is taken from the first.

    The parts' files are copied as they are and numbered anew; the manifest is written last, so that no half of a merge
    is a log. Raises LogError where `out` is not empty, and where logs differ in models, settings or a prompt's text.
    """
    out, folders = location(out), [location(folder) for folder in logs]
    manifests = [log.read_manifest(folder) for folder in folders]
    parts: dict[tuple[str, str], tuple[Location, dict[str, Any]]] = {}
    failed: dict[tuple[str, str], dict[str, Any]] = {}
    duplicates = 0
    for folder, manifest in zip(folders, manifests):
        if told := log.difference(manifest, manifests[0]):
            raise log.LogError(f"{folder} was collected with {told} as in {folders[0]}; such logs are not merged")
        for part in manifest["parts"]:
            first, same = parts.setdefault((part["file"], part["prompt"]), (folder, part))
            if same["sha256"] != part["sha256"]:
                raise log.LogError(
                    f"{folder} holds another prompt {part['file']}/{part['prompt']} than {first}: its file was edited, "
                    "or two files share a name"
                )
            duplicates += same is not part
        for line in log.read_failed(folder):
            failed.setdefault((line["file"], line["prompt"]), line)
    make_folder(out)
    with log.locked(out):
        if there := sorted(names(out) - {log.LOCK}):
            raise log.LogError(f"{out}: holds {there[0]}; give a new folder to merge into")
        merged = []
        for number, (folder, part) in enumerate(parts.values()):
            merged.append({**part, "number": number, **log.write_part(out, number, log.read_part(folder, part))})
        kept = [line for key, line in failed.items() if key not in parts]
        log.write_failed(out, kept)
        log.write_manifest(out, {**manifests[0], "parts": merged})
    return Merged(len(merged), duplicates, len(kept))
