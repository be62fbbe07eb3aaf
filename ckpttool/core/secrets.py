"""Credentials, which are never shown: where the environment has them, and texts without them."""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections.abc import Mapping
from urllib.parse import unquote

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
"""The variables that hold nothing but a secret."""
_NAME = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
_SHORTEST = 8
"""Characters: a shorter secret is none, and may stand in any text."""
_HIDDEN = "***"
_USER = re.compile(r"(?<=://)[^/?#\s'\"<>]*@")
_QUERY = re.compile(r"(?<=\?)[^\s'\"<>)\]]+=[^\s'\"<>)\]]+")


def hidden_texts() -> dict[str, str]:
    """Return the secrets of the environment, each with what is shown in its place; the longest come first.

    Of URLs, as of proxies, that is what stands between ``://`` and ``@``, also as HTTP sends it.
    """
    environment = dict(os.environ)  # once: each look into os.environ encodes and decodes, and errors are many
    values = {part for name in VARIABLES for part in environment.get(name, "").split()}
    urls = (value for value in environment.values() if "://" in value)
    users = {user[0].removesuffix("@") for value in urls for user in _USER.finditer(value)}
    names = {unquote(user) for user in users} | {":".join(environment.get(name, "") for name in _NAME)}
    values |= {b64encode(name.encode("utf-8", "surrogateescape")).decode() for name in names}
    texts = {value: _HIDDEN for value in values if len(value) >= _SHORTEST}
    texts |= {f"://{user}@": f"://{_HIDDEN}@" for user in users}
    return dict(sorted(texts.items(), key=lambda one: -len(one[0])))


def without_secrets(text: str, hidden: Mapping[str, str] | None = None) -> str:
    """Return what may be shown of an answer, which may quote other URLs: all but the secrets."""
    for secret, shown in (hidden_texts() if hidden is None else hidden).items():
        text = text.replace(secret, shown)
    return text


def without_signatures(text: str, hidden: Mapping[str, str] | None = None) -> str:
    """Return what may be shown of an error: of each URL neither user and password nor the query, either."""
    if "://" in text:
        text = _QUERY.sub(_HIDDEN, _USER.sub(f"{_HIDDEN}@", text))
    return without_secrets(text, hidden)
