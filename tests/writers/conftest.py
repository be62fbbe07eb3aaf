"""What tests of writers share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Oracle = Callable[..., Any]
_ANSWER = "ANSWER"


@pytest.fixture(scope="session")
def tensorflow() -> Iterator[Oracle]:
    """Return what asks TensorFlow, which runs in a process of its own; see ``tf_oracle``."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("tf_oracle.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        lines = process.stdout

        def ask(name: str, *arguments: Any) -> Any:
            print(json.dumps([name, arguments], default=str), file=process.stdin, flush=True)
            line = next(line for line in lines if line.startswith(_ANSWER))
            answer, failure = json.loads(line.removeprefix(_ANSWER))
            if failure is not None:
                raise AssertionError(failure)
            return answer

        yield ask
        process.stdin.close()
