"""What all results of the library have: a short repr, their JSON document, and their rows as a table."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any, ClassVar

from ckpttool.core.documents import dumps
from ckpttool.core.errors import MissingPackage


class Result(ABC):
    """What a function of the library returns."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.summary}>"

    @property
    @abstractmethod
    def summary(self) -> str:
        """Return it in a few words."""

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """Return its JSON document; NaN and the infinities are still floats."""

    def to_dict(self) -> dict[str, Any]:
        """Return the document that the command line prints with ``--json``, as plain data.

        NaN and the infinities are strings, as they are there.
        """
        document: dict[str, Any] = json.loads(dumps(self.document()))
        return document


class Table(Result):
    """A result that consists of rows."""

    __slots__ = ()
    _ROWS: ClassVar[tuple[str | int, ...]]
    """The keys under which the document has the rows."""

    def to_frame(self) -> Any:
        """Return its rows as a pandas DataFrame; inner values have dotted columns, such as ``metrics.loss``.

        Raises:
            MissingPackage: pandas isn't installed.
        """
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise MissingPackage("to_frame", "it needs pandas", expected="pip install pandas") from error
        rows: Any = self.to_dict()
        for key in self._ROWS:
            rows = rows[key]
        return pandas.json_normalize(rows)
