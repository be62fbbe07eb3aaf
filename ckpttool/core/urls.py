"""URLs of files in stores, and the removal of credentials from texts."""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections.abc import Mapping
from urllib.parse import unquote

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
ODD = "?"
"""Prefix of a quoted part of a URL, for names such as ``a#b`` that can't be one."""
HUB_KINDS = ("datasets", "spaces")
"""Prefixes of the paths of repositories in the Hugging Face Hub; models have none."""


def is_url(path: str) -> bool:
    """Return whether a path is a URL of a store."""
    return "://" in path and _URL.match(path) is not None


def has_odd_name(path: str) -> bool:
    """Return whether a path is a URL with a quoted part."""
    return is_url(path) and f"/{ODD}" in path


def store_root(url: str) -> str:
    """Return the URL of the bucket, host or repository that a URL is in."""
    # A repository of the Hugging Face Hub is ``hf://OWNER/NAME``, or ``hf://datasets/OWNER/NAME``.
    scheme, _, rest = url.partition("://")
    parts = rest.split("/")
    count = 1 if scheme != "hf" else 3 if parts[0] in HUB_KINDS else 2
    return f"{scheme}://{'/'.join(parts[:count])}"


def plain_url(url: str) -> str:
    """Return a URL without ``.``, ``..`` and doubled slashes."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{os.path.normpath(rest)}"


# Credentials ----------------------------------------------------------------------------------------


VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_MASTER_KEY",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_TOKEN",
    "AZURE_STORAGE_CLIENT_SECRET",
    "AZURE_CLIENT_SECRET",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "DATABRICKS_TOKEN",
    "WANDB_API_KEY",
)
"""Variables that consist of a secret."""
_MLFLOW_LOGIN = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
_SHORTEST = 8
"""Least characters of a secret; shorter values may occur in any text."""
_HIDDEN = "***"
_USER = re.compile(r"(?<=://)[^/?#\s'\"<>]*@")
_QUERY = re.compile(r"(?<=\?)[^\s'\"<>)\]]+=[^\s'\"<>)\]]+")


def hidden_texts() -> dict[str, str]:
    """Return replacements for the secrets of the environment, the longest secret first."""
    # Secrets may be echoed by a client's error in three forms: as the value of a variable, as
    # ``user:password@`` in a URL such as a proxy's, and as Base64 in an HTTP header (basic authentication).
    environment = dict(os.environ)  # once: each look into os.environ encodes and decodes, and errors are many
    values = {part for name in VARIABLES for part in environment.get(name, "").split()}
    urls = (value for value in environment.values() if "://" in value)
    users = {user[0].removesuffix("@") for value in urls for user in _USER.finditer(value)}
    names = {unquote(user) for user in users} | {
        ":".join(environment.get(name, "") for name in _MLFLOW_LOGIN)
    }
    values |= {b64encode(name.encode("utf-8", "surrogateescape")).decode() for name in names}
    texts = {value: _HIDDEN for value in values if len(value) >= _SHORTEST}
    texts |= {f"://{user}@": f"://{_HIDDEN}@" for user in users}
    return dict(sorted(texts.items(), key=lambda one: -len(one[0])))


def without_secrets(text: str, hidden: Mapping[str, str] | None = None) -> str:
    """Return a text without the secrets of the environment."""
    for secret, shown in (hidden_texts() if hidden is None else hidden).items():
        text = text.replace(secret, shown)
    return text


def without_signatures(text: str, hidden: Mapping[str, str] | None = None) -> str:
    """Return a text without secrets, and without user, password and query of each URL."""
    if "://" in text:
        text = _QUERY.sub(_HIDDEN, _USER.sub(f"{_HIDDEN}@", text))
    return without_secrets(text, hidden)
