"""Where logs and prompt files lie: a path here, or a URI that fsspec reads (`s3://`, `gs://`, `memory://` ...)."""

import os
from pathlib import Path

from upath import UPath

Location = Path | UPath

# Here an object appears whole, when all of it has been sent, and never half.
STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "memory")


def location(place: str | Location) -> Location:
    """A path, or a universal_pathlib path for a URI; raises ValueError where fsspec cannot open such a URI."""
    if isinstance(place, Path | UPath) or "://" not in place:
        return place if isinstance(place, UPath) else Path(place)
    try:
        uri = UPath(place, use_listings_cache=False)  # others write there too
        uri.fs  # noqa: B018  the client that such a URI needs is imported here
    except (ImportError, ValueError) as error:
        raise ValueError(f"{place}: cannot be opened ({error}); s3:// needs `pip install treegraft[s3]`") from error
    if uri.protocol != "memory" and not uri.path.strip("/"):
        raise ValueError(f"{place}: names no bucket; give {uri.protocol}://BUCKET/NAME")
    return Path(uri.path) if uri.protocol in ("file", "local") else uri


def make_folder(folder: Location) -> None:
    """Make a local folder; a store has none. Raises ValueError for a URI where a file could appear half written."""
    if isinstance(folder, Path):
        folder.mkdir(parents=True, exist_ok=True)
    elif folder.protocol not in STORES:
        raise ValueError(f"{folder}: a log is written to a local folder or to one of {', '.join(STORES)}")


def names(folder: Location) -> set[str]:
    """The names of all that lies directly in a folder; none where there is no such folder."""
    try:
        return {path.name for path in folder.iterdir()}
    except FileNotFoundError:
        return set()


def listing(folder: Location) -> dict[str, int]:
    """The files directly in a folder and their sizes in bytes; none where there is no such folder."""
    try:
        if isinstance(folder, Path):
            return {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
        found = {file["name"].rpartition("/")[2]: file for file in folder.fs.ls(folder.path, detail=True)}
        return {name: file["size"] for name, file in found.items() if name and file["type"] == "file"}
    except FileNotFoundError:
        return {}


def write_whole(path: Location, content: bytes) -> None:
    """Write a file of which a reader sees nothing (or the old one) or all, whatever stops the writer.

    A store does that by itself. In a local folder the file is written aside, flushed to disk with its folder, and
    renamed. Raises OSError, with nothing left behind.
    """
    if not isinstance(path, Path):
        path.fs.pipe_file(path.path, content)
        return
    aside = path.with_name(f".{path.name}.partial")
    try:
        aside.write_bytes(content)
        _flush(aside)
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)  # on a full disk its space is needed
        raise
    _flush(path.parent)


def _flush(path: Path) -> None:
    """Make a file's content, or a folder's renames, outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
