"""A bucket on a server of this machine that answers as Amazon S3 does."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

_NUMBERS = count(1)


def environment(endpoint: str) -> dict[str, str]:
    """Return the environment in which a process talks to a server instead of Amazon."""
    return {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }


@dataclass(frozen=True)
class Bucket:
    """A bucket, with what talks to it around ckpttool."""

    name: str
    client: Any

    def url(self, key: str = "") -> str:
        """Return the URL of an object, or of the bucket."""
        return f"s3://{self.name}/{key}" if key else f"s3://{self.name}"

    def put(self, key: str, data: bytes | str) -> None:
        """Write an object."""
        content = data.encode() if isinstance(data, str) else data
        self.client.put_object(Bucket=self.name, Key=key, Body=content)

    def get(self, key: str) -> bytes:
        """Return an object's bytes."""
        return self.client.get_object(Bucket=self.name, Key=key)["Body"].read()

    def upload(self, local_path: Path | str, key: str) -> None:
        """Write a file, or all files below a directory; where a link leads, the bytes there."""
        path = Path(local_path)
        if path.is_dir():
            for file in sorted(one for one in path.rglob("*") if one.is_file()):
                below = file.relative_to(path).as_posix()
                self.put(f"{key}/{below}" if key else below, file.read_bytes())
        else:
            self.put(key, path.read_bytes())

    def keys(self, prefix: str = "") -> list[str]:
        """Return the names of all objects."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        return [one["Key"] for page in pages for one in page.get("Contents", ())]


def new_bucket(client: Any) -> Bucket:
    """Make a bucket that nobody has used."""
    name = f"bucket-{next(_NUMBERS)}"
    client.create_bucket(Bucket=name)
    return Bucket(name, client)


def client_of(endpoint: str) -> Any:
    """Return what talks to a server around ckpttool."""
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id="x",
        aws_secret_access_key="y",
    )
