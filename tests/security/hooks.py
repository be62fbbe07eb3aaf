"""Objects that call what they hold: the unpickler, a container or a function asks them for an attribute."""

from __future__ import annotations

from typing import Any

from tests.security.assembler import Build, Call, Code, Discarded, Name, call, spelled
from tests.security.calls import EVAL, Place, Variants, attack

SPACE = Call(Name("types", "SimpleNamespace"))
ATTRIBUTES = Name("lightning.fabric.utilities.data", "AttributeDict")


def appended(target: Any, item: Any) -> Code:
    """Return an object to which APPEND gives something."""
    return Code(spelled(target, 2) + spelled(item, 2) + b"a")


def added(target: Any, item: Any) -> Code:
    """Return an object to which ADDITEMS gives something."""
    return Code(spelled(target, 2) + b"(" + spelled(item, 2) + b"\x90")


def put(target: Any, key: Any, value: Any) -> Code:
    """Return an object to which SETITEM gives something."""
    return Code(spelled(target, 2) + spelled(key, 2) + spelled(value, 2) + b"s")


@attack
def unpickler_hooks(place: Place) -> Variants:
    """The attributes that the unpickler itself looks up: an object's own come first."""
    code = place.expression
    yield "namespace.append", appended(Build(SPACE, {"append": EVAL}), code)
    yield "namespace.slot", appended(Build(SPACE, (None, {"append": EVAL})), code)
    yield "namespace.add", added(Build(SPACE, {"add": EVAL}), code)
    yield "popped", Discarded(appended(Build(SPACE, {"append": EVAL}), code))
    yield "ordered.append", appended(Build(call("collections", "OrderedDict"), {"append": EVAL}), code)
    yield "counter.append", appended(Build(call("collections", "Counter"), {"append": EVAL}), code)
    user = Call(Name("collections", "UserDict"), how="newobj")
    yield "user_dict.append", appended(Build(user, {"append": EVAL}), code)
    slots = Build(call("collections", "OrderedDict"), (None, {"__setstate__": EVAL}))
    yield "ordered.setstate", Build(slots, code)


@attack
def attribute_dictionaries(place: Place) -> Variants:
    """Dictionaries that give their values for attributes."""
    made = Call(ATTRIBUTES, how="newobj")
    yield "append", appended(put(made, "append", EVAL), place.expression)
    yield "setstate", Build(put(made, "__setstate__", EVAL), place.expression)
    spelled_out = call("builtins", "str", "__setstate__")
    yield "setstate.spelled", Build(put(made, spelled_out, EVAL), place.expression)
    given_back = call("torch.jit._pickle", "restore_type_tag", "__setstate__", "")
    yield "setstate.given_back", Build(put(made, given_back, EVAL), place.expression)


@attack
def wrapping_containers(place: Place) -> Variants:
    """Containers of the standard library that hand on what they are given to what they hold."""
    modules = Call(Name("torch.nn.modules.container", "ModuleDict"), how="newobj")
    held = Build(modules, {"add_module": EVAL})
    user = Call(Name("collections", "UserDict"), how="newobj")
    yield "user_dict", put(Build(user, {"data": held}), place.expression, {})
    chain = Call(Name("collections", "ChainMap"), how="newobj")
    yield "chain_map", put(Build(chain, {"maps": [held]}), place.expression, {})


@attack
def odd_arguments(place: Place) -> Variants:
    """Arguments that a call makes, so that nobody sees how many and which they are."""
    arguments = call("builtins", "tuple", [place.expression])
    yield "tuple", Code(spelled(EVAL, 2) + spelled(arguments, 2) + b"R")
    yield (
        "restored",
        Code(
            spelled(EVAL, 2)
            + spelled(call("torch.jit._pickle", "restore_type_tag", (place.expression,), ""), 2)
            + b"R"
        ),
    )
    module, name = call("builtins", "str", "builtins"), call("builtins", "str", "eval")
    found = spelled(module, 2) + spelled(name, 2) + b"\x93"
    yield "name", Code(found + spelled((place.expression,), 2) + b"R")


@attack
def patched_classes(place: Place) -> Variants:
    """A tensor's attribute that is taken for a method gives the class back, on which a state is then set."""
    parameter = call("torch.nn.parameter", "Parameter")
    evaluates = call("torch.jit._pickle", "restore_type_tag", EVAL, "x")
    for variant, same in (
        ("type", Name("numpy", "object_")),
        (
            "function",
            call("torch.jit._pickle", "restore_type_tag", Name("torch.jit._pickle", "build_intlist"), "x"),
        ),
    ):
        rebuild = Name("torch._utils", "_rebuild_parameter_with_state")
        arguments = (parameter, False, {}, {"as_subclass": same})
        state = {"requires_grad": place.expression, "requires_grad_": evaluates}
        patched = call(
            "torch._tensor", "_rebuild_from_type_v2", rebuild, Name("torch", "Tensor"), arguments, state
        )
        yield variant, Discarded(patched, call("torch.nn.parameter", "Buffer", parameter))


@attack
def attributes_for_methods(place: Place) -> Variants:
    """A listed constructor looks up what a state has set: `dict` calls `keys`, `list` iterates."""
    partial = call("functools", "partial", EVAL, place.expression)
    for module, name in (("argparse", "Namespace"), ("types", "SimpleNamespace")):
        holder = Build(Call(Name(module, name)), {"keys": partial})
        for container in ("dict", "OrderedDict"):
            owner = "builtins" if container == "dict" else "collections"
            yield f"{name}.{container}", call(owner, container, holder)
    user = Call(Name("collections", "UserDict"), how="newobj")
    yield (
        "user_dict.list",
        call("builtins", "list", Build(user, {"data": call("builtins", "map", EVAL, [place.expression])})),
    )
