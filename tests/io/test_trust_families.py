"""The families of the list of trust: what lies in those modules of torch, and what making it runs."""

from __future__ import annotations

import enum
import importlib
import pkgutil
import sys
import warnings
from collections.abc import Iterator

import pytest

from ckpttool.io.trust import _allowed, admitted_by_weights_only, kind_of, modern

REVIEWED_NEW = {
    "abc.ABCMeta": "a metaclass: it refuses to be made without arguments",
    "builtins.dict": "empty",
    "builtins.int": "a number",
    "builtins.object": "empty",
    "builtins.str": "empty",
    "builtins.tuple": "empty",
    "torch.Size": "empty",
    "torch.Tensor": "empty",
    "torch._C.TensorBase": "an empty tensor",
    "torch._C._FunctionBase": "empty",
    "torch._C._NodeBase": "empty",
    "torch.nn.modules.container.Container": "warns",
    "torch.nn.modules.loss.NLLLoss2d": "warns",
    "torch.nn.parameter.Buffer": "an empty tensor",
    "torch.nn.parameter.Parameter": "an empty tensor",
    "torch.nn.parameter.UninitializedBuffer": "an empty tensor",
    "torch.nn.parameter.UninitializedParameter": "an empty tensor",
    "typing.Any": "refuses to be made",
    "typing.Generic": "empty",
    "typing_extensions.ParamSpec": "refuses to be made without a name",
}
"""What runs when an instance is made without arguments, by the class that has it, and what it does."""

REVIEWED_SETSTATE = {
    "torch.Tensor": "takes a storage, sizes and strides",
    "torch.ao.nn.quantized.modules.conv._ConvNd": "attributes, and packs its weights",
    "torch.ao.nn.sparse.quantized.linear.LinearPackedParams": "attributes",
    "torch.fx.node.Node": "attributes",
    "torch.utils.hooks.RemovableHandle": "takes a dictionary",
}
"""What takes a state, besides ``torch.nn`` and ``torch.optim``, whose own copy it into their attributes."""
OF_TORCH = ("torch.nn.modules.", "torch.nn.parallel.", "torch.optim.")


def modules() -> Iterator[str]:
    """Yield the modules of torch that a row of the list names with all that is in them."""
    for family, kind in _allowed()[1]:
        if kind == "new" and family.startswith("torch."):
            package = importlib.import_module(family.removesuffix(".*"))
            yield package.__name__
            if family.endswith(".*"):
                found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
                yield from (module.name for module in found)


def owner(cls: type, attribute: str) -> str | None:
    """Return the class that brings an attribute."""
    found = next((base for base in cls.__mro__ if attribute in vars(base)), None)
    return None if found is None else f"{found.__module__}.{found.__qualname__}"


def needs_arguments(cls: type) -> bool:
    """Tell whether a class can't be made without arguments: an enumeration, a named tuple."""
    return issubclass(cls, enum.Enum) or (issubclass(cls, tuple) and hasattr(cls, "_fields"))


@pytest.mark.framework
def test_making_what_lies_in_a_family_runs_nothing_that_nobody_looked_at() -> None:
    unseen: set[tuple[str, str]] = set()
    count = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old homes of modules say that they are old
        for name in modules():
            importlib.import_module(name)
            for attribute, cls in vars(sys.modules[name]).items():
                if not isinstance(cls, type) or kind_of(name, attribute) != "new":
                    continue
                count += 1
                made, state = owner(cls, "__new__"), owner(cls, "__setstate__")
                if made not in REVIEWED_NEW and not needs_arguments(cls):
                    unseen.add((f"{name}.{attribute}", f"__new__ of {made}"))
                if state not in {None, *REVIEWED_SETSTATE} and not str(state).startswith(OF_TORCH):
                    unseen.add((f"{name}.{attribute}", f"__setstate__ of {state}"))
    assert count > 400
    assert unseen == set()


@pytest.mark.framework
def test_what_pytorch_loads_with_weights_only_is_on_the_list() -> None:
    from torch._weights_only_unpickler import _get_allowed_globals

    names = (dotted.rpartition(".") for dotted in _get_allowed_globals())
    missing = {f"{module}.{name}" for module, _, name in names if kind_of(*modern(module, name)) is None}
    assert missing == set()
    allowed = {tuple(dotted.rpartition(".")[::2]) for dotted in _get_allowed_globals()}
    assert admitted_by_weights_only() == allowed


def is_dtype(value: object) -> bool:
    import numpy as np

    return isinstance(value, type) and issubclass(value, np.generic)


@pytest.mark.framework
def test_types_of_elements_are_on_the_list() -> None:
    import ml_dtypes
    import numpy as np
    import torch

    kinds = (torch.dtype, torch.layout, torch.qscheme)
    names = [("torch", name) for name, value in vars(torch).items() if isinstance(value, kinds)]
    scalars = [name for name, value in vars(np).items() if is_dtype(value)]
    names += [("numpy", name) for name in scalars]
    names += [("numpy.dtypes", name) for name in vars(np.dtypes) if name.endswith("DType")]
    names += [("ml_dtypes", name) for name, value in vars(ml_dtypes).items() if is_dtype(value)]
    assert [pair for pair in names if kind_of(*pair) is None] == []
