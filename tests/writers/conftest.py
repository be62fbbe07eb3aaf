"""What tests of writers share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.frameworks import conversation_with_frameworks

Oracle = Callable[..., Any]
_ANSWER = "ANSWER"


@pytest.fixture(scope="session")
def tensorflow() -> Iterator[Oracle]:
    """Return what asks TensorFlow, which runs in a process of its own; see ``tf_oracle``."""
    oracle = Path(__file__).with_name("tf_oracle.py")
    with conversation_with_frameworks(oracle, env={"CUDA_VISIBLE_DEVICES": ""}) as (orders, lines):

        def ask(name: str, *arguments: Any) -> Any:
            print(json.dumps([name, arguments], default=str), file=orders, flush=True)
            line = next(line for line in lines if line.startswith(_ANSWER))
            answer, failure = json.loads(line.removeprefix(_ANSWER))
            if failure is not None:
                raise AssertionError(failure)
            return answer

        yield ask
