"""Objects whose loading calls an attribute: none of their classes has a row in the table of constructors."""

from __future__ import annotations

from typing import Any

from tests.security.assembler import Build, Call, Name, call
from tests.security.calls import USER_MODULE, Place, Variants, attack

ATTRIBUTES = Name("lightning.fabric.utilities.data", "AttributeDict")


def new(module: str, name: str, **state: Any) -> Any:
    return Build(Call(Name(module, name), how="newobj"), state)


def calling(function: Any, *arguments: Any) -> Any:
    """Return an object that, when it is called, calls what it only keeps: ``ParametrizationList.forward``."""
    kept = ("_backward_hooks", "_forward_hooks", "_forward_pre_hooks", "_parameters", "_buffers")
    hooks: dict[str, Any] = {name: {} for name in kept}
    originals = {f"original{at}": argument for at, argument in enumerate(arguments)}
    return new(
        "torch.nn.utils.parametrize", "ParametrizationList", **hooks, **originals,
        _modules={"0": function}, is_tensor=False, ntensors=len(arguments), unsafe=True,
    )  # fmt: skip


SPACE = call("types", "SimpleNamespace")
OPTIMIZERS = (
    *(
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "LBFGS",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
    ),
    *("SGD", "SparseAdam"),
)
MAPPINGS = {
    "dict": ("builtins", "dict"),
    "OrderedDict": ("collections", "OrderedDict"),
    "UserDict": ("collections", "UserDict"),
    "Counter": ("collections", "Counter"),
    "AttributeDict": (ATTRIBUTES.module, ATTRIBUTES.attribute),
}
OWNERS = (
    ("argparse", "Namespace", "newobj"),
    ("types", "SimpleNamespace", "reduce"),
    ("collections", "UserDict", "newobj"),
    (ATTRIBUTES.module, ATTRIBUTES.attribute, "newobj"),
)
IDLE = {
    "UserDict of collections.UserDict",
    "Counter of argparse.Namespace",
    "Counter of types.SimpleNamespace",
}
"""Mappings that call nothing in the versions at hand."""


def mappings(called: Any) -> dict[str, Any]:
    """Return mappings that are made from an object, whose ``keys`` they call."""
    return {
        f"{name} of {module}.{owner}": call(
            *maker, Build(Call(Name(module, owner), how=how), {"keys": called})
        )
        for name, maker in MAPPINGS.items()
        for module, owner, how in OWNERS
    }


def optimizers(called: Any) -> dict[str, Any]:
    """Return optimizers, whose states are set by calling ``setdefault`` of the defaults and of each group."""
    group = Build(SPACE, {"setdefault": called})
    state = {"param_groups": [group], "state": {}, "defaults": group}
    return {
        f"torch.optim.{name}": Build(Call(Name("torch.optim", name), how="newobj"), state)
        for name in OPTIMIZERS
    }


def sequences(called: Any) -> dict[str, Any]:
    """Return sequences that are made from what only looks like one."""
    return {
        **{
            f"{name} of UserList": call(owner, name, new("collections", "UserList", data=called))
            for owner, name in (
                *(("builtins", name) for name in ("list", "tuple", "set", "frozenset")),
                *(("collections", name) for name in ("deque", "UserList", "ChainMap")),
            )
        },
        "ChainMap": new("collections", "ChainMap", maps=[Build(SPACE, {"__contains__": called})]),
    }


@attack
def called_attributes(place: Place) -> Variants:
    """Attributes that are called while an object is made, by names that are on no list of dangerous ones."""
    save_text = (Name("numpy", "savetxt"), place.marker, [1.0])
    functions = (
        save_text,
        (Name("torch", "save"), [1], place.marker),
        (Name(USER_MODULE, "make"), place.marker),
    )
    for at, name in enumerate(mappings(None)):
        if name not in IDLE and ATTRIBUTES.attribute not in name:  # Lightning takes long to import
            yield name, mappings(calling(*functions[at % len(functions)]))[name]
    called = call("functools", "partial", *save_text)  # which takes the arguments of an optimizer, too
    yield from optimizers(called).items()
