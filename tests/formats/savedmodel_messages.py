"""SavedModels built by hand, field by field, for tests of what no framework writes."""

from __future__ import annotations

from pathlib import Path

from tests.support.protobuf import bytes_field as part
from tests.support.protobuf import number_field as number


def node(name: str, op: str) -> bytes:
    return part(1, name) + part(2, op)


def text_constant(name: str, value: str) -> bytes:
    """Return a node that is a constant string."""
    tensor = number(1, 7) + part(2, b"") + part(8, value)
    return node(name, "Const") + attribute("value", part(8, tensor))


def attribute(name: str, value: bytes) -> bytes:
    """Return an attribute of a node; its value is a field of AttrValue: ``part(2, "text")``."""
    return part(5, part(1, name) + part(2, value))


def taking(*inputs: str) -> bytes:
    """Return the inputs of a node."""
    return b"".join(part(3, name) for name in inputs)


def function(name: str, *nodes: bytes, takes: tuple[str, ...] = ()) -> bytes:
    """Return a function of some nodes, with the names of its arguments."""
    signature = part(1, name) + b"".join(part(2, part(1, argument)) for argument in takes)
    return part(1, signature) + b"".join(part(3, node) for node in nodes)


def graph(*nodes: bytes, functions: tuple[bytes, ...] = ()) -> bytes:
    library = b"".join(part(1, function) for function in functions)
    return b"".join(part(1, node) for node in nodes) + (part(2, library) if library else b"")


def model(*meta_graphs: bytes, schema: int = 1) -> bytes:
    return number(1, schema) + b"".join(part(2, meta_graph) for meta_graph in meta_graphs)


def meta_graph(body: bytes = b"", *more: bytes) -> bytes:
    """Return a meta graph with tags, a version, the graph `body`, and more fields."""
    return part(1, part(4, "serve") + part(5, "2.21.0")) + part(2, body) + b"".join(more)


def asset(name: str) -> bytes:
    return part(6, part(2, name))


def written(directory: Path, content: bytes, name: str = "saved_model.pb") -> Path:
    """Return a new directory that holds a model."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(content)
    return directory
