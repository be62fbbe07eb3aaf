"""``python -m tests.benchmarks.stores``: what reading from a store costs in requests and bytes, as a table.

Checkpoints of 256 tensors lie on a local server that answers as Amazon S3 does; a proxy in front
of it counts. ``--peer PYTHON`` names a Python with s3fs and h5py, which lists what is in the same objects.
"""

from __future__ import annotations

import argparse
import http.client
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tests.benchmarks import data, frameworks
from tests.support.stores import Bucket, S3Bucket, client_of, environment, serve_apart

_PEER = """
import json, struct, sys, zipfile
import s3fs
files = s3fs.S3FileSystem(client_kwargs={"endpoint_url": sys.argv[1]}, key="x", secret="y")
with files.open(sys.argv[2], "rb", block_size=1 << 16, cache_type="readahead") as file:
    head = file.read(8)
    if head.startswith(b"PK"):
        print(len(zipfile.ZipFile(file).namelist()))
    elif head.startswith(b"\\x89HDF"):
        import h5py
        names = []
        h5py.File(file).visititems(lambda name, item: names.append((name, getattr(item, "shape", None))))
        print(len(names))
    else:
        print(len(json.loads(file.read(struct.unpack("<Q", head)[0]))))
"""


_MEBIBYTES = 64
_SERIES = 100
_URL, _FILE = "URL", "FILE"
_ONE = (("inspect", "-q", _URL), ("verify", "-q", _URL))
_COPY = (("diff", "-q", _FILE, _URL), ("verify", "-q", _FILE, "--against", _URL))
_RUN = (
    ("list", "-q", _URL),
    ("latest", _URL),
    ("verify", "-q", _URL),
    ("prune", "-n", "-q", "--keep", "10", _URL),
    ("copy", "-q", _FILE, _URL),
)


class Case(NamedTuple):
    """A checkpoint, or a directory of them, and the commands that are counted on it."""

    title: str
    name: str
    write: Callable[[Path], None]
    commands: Sequence[Sequence[str]] = _ONE


_CASES = (
    Case("a PyTorch zip", "model.pth", lambda path: data.write_zip(path, _MEBIBYTES), _ONE + _COPY),
    Case("safetensors", "model.safetensors", lambda path: data.write_safetensors(path, _MEBIBYTES)),
    Case(
        "a TensorFlow checkpoint",
        "ckpt",
        lambda path: frameworks.write(frameworks.TENSORFLOW, path, _MEBIBYTES),
    ),
    Case(
        "Keras weights (HDF5)",
        "model.weights.h5",
        lambda path: frameworks.write(frameworks.KERAS, path, _MEBIBYTES),
    ),
    Case("a DCP directory", "dcp", lambda path: frameworks.write(frameworks.DCP, path, _MEBIBYTES)),
    Case(f"{_SERIES} PyTorch zips", "run", lambda path: data.write_series(path, _SERIES), _RUN),
)


class Counter:
    """A proxy that counts the requests and the bytes of the answers."""

    def __init__(self, port: int) -> None:
        self.requests = self.nbytes = 0
        lock = threading.Lock()
        counter = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                connection = http.client.HTTPConnection("127.0.0.1", port)
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                connection.request(self.command, self.path, body, dict(self.headers.items()))
                answer = connection.getresponse()
                content = answer.read()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                self.wfile.write(content)
                with lock:
                    counter.requests += 1
                    counter.nbytes += len(content)

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

            def log_message(self, format: str, *values: object) -> None:
                """Keep silent."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def of(self, command: list[str], variables: dict[str, str]) -> tuple[int, int]:
        """Return how many requests a command makes, and how many bytes it gets."""
        self.requests = self.nbytes = 0
        subprocess.run(command, env={**os.environ, **variables}, stdout=subprocess.DEVNULL, check=True)
        return self.requests, self.nbytes


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("python -m tests.benchmarks.stores", description=__doc__)
    parser.add_argument("--peer", metavar="PYTHON", help="a Python with s3fs")
    options = parser.parse_args()
    with serve_apart() as endpoint, TemporaryDirectory() as directory:
        counter = Counter(int(endpoint.rpartition(":")[2]))
        bucket = S3Bucket(client_of(endpoint))
        print("| command | requests | MB | s3fs: requests | MB | download: MB |")
        print("| --- | ---: | ---: | ---: | ---: | ---: |")
        for case in _CASES:
            folder = Path(directory) / case.name
            folder.mkdir()
            case.write(folder / case.name)
            _print_rows(case, folder, bucket, counter, options.peer)
            shutil.rmtree(folder)


def _print_rows(case: Case, folder: Path, bucket: Bucket, counter: Counter, peer: str | None) -> None:
    files = [one for one in folder.rglob("*") if one.is_file()]
    names = [file.relative_to(folder).as_posix() for file in files]
    for file, key in zip(files, names, strict=True):
        bucket.client.upload_file(str(file), bucket.name, key)
    variables, path = environment(counter.url), folder / case.name
    total = sum(file.stat().st_size for file in files) / 1e6
    for command in case.commands:
        places = {_URL: bucket.url(case.name), _FILE: str(path)}
        if command[0] == "copy":
            places[_URL] = bucket.url()
        words = [places.get(word, word) for word in command]
        own = _shown(*counter.of([sys.executable, "-m", "ckpttool", *words], variables))
        theirs = "– | –"
        if peer is not None and command[0] == "inspect" and path.is_file():
            key = f"{bucket.name}/{case.name}"
            theirs = _shown(*counter.of([peer, "-c", _PEER, counter.url, key], variables))
        options = " ".join(word for word in command[1:] if word not in ("-q", _URL, _FILE))
        print(f"| {command[0]} {options} {case.title} | {own} | {theirs} | {total:,.0f} |".replace("  ", " "))
    for key in names:
        bucket.client.delete_object(Bucket=bucket.name, Key=key)


def _shown(requests: int, nbytes: int) -> str:
    return f"{requests:,} | {nbytes / 1e6:,.2f}"


if __name__ == "__main__":
    main()
