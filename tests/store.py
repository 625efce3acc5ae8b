"""A real object store that speaks S3: SeaweedFS, on loopback, for as long as a test needs it."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from treegraft.data.files import location

BUCKET = "bucket"
SERVERS = ("master", "volume", "filer", "s3", "admin")


@contextmanager
def s3_store(folder: Path) -> Iterator[str]:
    """The URI of a bucket whose objects lie in `folder`; sets AWS_* in the environment, restored at the end."""
    with ExitStack() as held:  # all at once, so that no two are the same
        sockets = [held.enter_context(socket.socket()) for _ in range(2 * len(SERVERS))]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in sockets]
    named = dict(zip([name + kind for name in SERVERS for kind in (".port", ".port.grpc")], ports, strict=True))
    ours = {
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{named['s3.port']}",
    }  # fmt: skip
    usual = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    off = ["-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command = [
        Path(sys.executable).with_name("weed"), "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        f"-bucket={BUCKET}", *off, *(f"-{name}={port}" for name, port in named.items()),
    ]  # fmt: skip
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(server)
        yield f"s3://{BUCKET}"
    finally:
        server.kill()
        server.wait()
        for port in ports:
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink()
        for name, value in usual.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _wait(server: subprocess.Popen) -> None:
    """Until an object can be written and removed again."""
    first = location(f"s3://{BUCKET}/first")
    for _ in range(120):
        assert server.poll() is None
        with contextlib.suppress(OSError):
            first.write_bytes(b"written")
            first.unlink()
            return
        time.sleep(0.5)
    raise AssertionError("SeaweedFS does not answer")
