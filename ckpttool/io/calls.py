"""Which calls of a pickle make plain data: each name on the list, with the arguments that it may have.

A name that is kept is data. A name that is *called* runs, and what it is given may run, too: so a call is
plain only if its function is on the list (``names/allowed.txt``) and its arguments are what the kind of that
function allows. No other name may be among them.

Source: CPython ``Lib/pickle.py``, ``Lib/copyreg.py``; NumPy ``numpy/_core/_internal.py``,
``numpy/random/_pickle.py``, ``numpy/ma/core.py``; PyTorch ``torch/_utils.py``, ``torch/_tensor.py``,
``torch/_weights_only_unpickler.py``; Paddle ``python/paddle/framework/io.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from typing import Any

from ckpttool.io.pickle_nodes import Call, Global, Mapped, Payload, Persistent
from ckpttool.io.states import Charge, called_kind, fits, free, has_plain_attributes, is_open_dtype
from ckpttool.io.trust import UNVETTED, Trust, is_dunder, is_made, kind_of, stranger

_COST_OF_A_PART, _COST_OF_AN_ITEM = 80, 16
"""What to look at a part of an argument costs, and at an item of a container, in bytes of the budget for what
is made: shared arguments are searched again with each call."""
_SCALARS = frozenset({int, str, float, bool, bytes, type(None), Payload})
_SHORT = 64
_WORST = (Trust.PLAIN, Trust.UNKNOWN, Trust.KNOWN, Trust.DANGEROUS)

_OBJECT = Global("builtins", "object")
_BASES = frozenset(
    {
        ("builtins", name)
        for name in ("bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list")
    }
    | {("builtins", name) for name in ("set", "str", "tuple")}
    | {("collections", "OrderedDict"), ("collections", "defaultdict")}
)
"""What an object of a subclass is made from in protocols below 2, besides ``object``."""
_TENSOR_FUNCTIONS = frozenset(
    {Global("torch._C", "_VariableFunctionsClass"), Global("torch._C", "_VariableFunctions")}
)
_READS_MEMORY = frozenset({"from_file", "frombuffer"})
_ARRAYS = frozenset({"_reconstruct", "_frombuffer"})


def judge(call: Call, charge: Charge = free) -> Trust:
    """Return what it means to make a call; those among its arguments are judged by themselves.

    ``charge`` is told what the search of the arguments costs, which may be asked for again and again.
    """
    function = call.function
    if not isinstance(function, Global):
        return Trust.DANGEROUS
    kind = kind_of(function.module, function.name)
    if kind is None:
        meaning = stranger(function.module, function.name)
        # `__new__` alone makes an empty object; what its class does with a state, nobody looked at.
        is_empty = call.is_new and not call.args and not call.kwargs
        return Trust.DANGEROUS if meaning is Trust.KNOWN and not is_empty else meaning
    if call.kwargs:
        return Trust.DANGEROUS
    return _KINDS[kind](call, charge)


def is_plain(call: Call) -> bool:
    """Tell whether what a call makes, and is filled with, is data that may be carried elsewhere."""
    function = call.function
    if not isinstance(function, Global) or not is_made(function.module, function.name):
        return False
    if (call.items and not takes_items(call)) or (call.pairs and not takes_pairs(call, call.pairs)):
        return False
    return judge(call) is Trust.PLAIN and (call.state is None or fits(call, call.state))


def dotted_name(call: Call) -> tuple[str, str] | None:
    """Return the listed name that ``getattr(class, "name")`` stands for; protocols below 4 spell it so."""
    if not call.is_of("builtins", "getattr") or len(call.args) != 2:
        return None
    owner, name = call.args
    if not isinstance(owner, Global) or not isinstance(name, str) or not name.isidentifier():
        return None
    dotted = f"{owner.name}.{name}"
    return (owner.module, dotted) if kind_of(owner.module, dotted) is not None else None


def takes_items(call: Call) -> bool:
    """Tell whether what a call makes may be appended to; what else takes items runs a method of its own."""
    return _is_filled_as(call, ("list",))


def takes_pairs(call: Call, pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Tell whether what a call makes may be given values by these keys.

    Some dictionaries give them for attributes, of which the unpickler itself looks one up.
    """
    return _is_filled_as(call, ("dict", "factory")) and all(_is_plain_key(key) for key, _ in pairs)


def _is_filled_as(call: Call, kinds: Collection[str]) -> bool:
    function = call.function
    if not isinstance(function, Global):
        return False
    kind = kind_of(function.module, function.name)
    if kind is None:
        return stranger(function.module, function.name) is not Trust.DANGEROUS  # the call itself is told
    if kind == "reconstructor" and call.args and isinstance(call.args[0], Global):
        return _is_filled_as(Call(call.args[0], ()), kinds)
    return kind in kinds


def _is_plain_key(key: object) -> bool:
    if isinstance(key, Call):  # which may spell anything, but for a member of an enumeration
        function = key.function
        return isinstance(function, Global) and kind_of(function.module, function.name) in (None, "constant")
    return not isinstance(key, Persistent | Payload) and key != "__setstate__"


# Arguments --------------------------------------------------------------------------------------------


def _names_in(value: object, charge: Charge) -> Iterator[Global]:
    """Yield every name in an argument, at any depth of containers and of what objects hold.

    An object that is no data stands for its class: a function that is given it may call its attributes. A
    persistent id may give back what it holds: PyTorch's old loaders take classes out of theirs.
    """
    pending, seen = [value], set[int]()
    while pending:
        charge(_COST_OF_A_PART)
        node = pending.pop()
        if isinstance(node, Global):
            yield node
        elif type(node) in _SCALARS or id(node) in seen:
            continue
        elif isinstance(node, Call):
            seen.add(id(node))
            yield from _makers_of(node)
            parts = (node.state, node.items, node.pairs, _unsearched_arguments(node))
            pending += (part for part in parts if part)
        elif isinstance(node, Persistent):
            if not _is_storage_id(node.id):
                pending.append(node.id)
        elif isinstance(node, list | tuple | set | frozenset | dict):
            seen.add(id(node))
            pending.extend(node)
            if isinstance(node, dict):
                pending.extend(node.values())
            if isinstance(node, Mapped):
                pending.append(node.state)
                pending += [node.factory] if isinstance(node.factory, Call) else []


def _makers_of(call: Call) -> Iterator[Global]:
    """Yield what made an object, unless it makes data."""
    made = _maker(call)
    if isinstance(made, Global) and (
        is_open_dtype(call) or kind_of(made.module, made.name) not in _GIVE_DATA
    ):
        yield made  # what else is called was told


def _maker(call: Call) -> object:
    """Return what a call calls, or of which class it makes an object as protocols below 2 do."""
    return call.args[0] if call.is_of("copyreg", "_reconstructor") and call.args else call.function


def _unsearched_arguments(call: Call) -> tuple[Any, ...]:
    """Return those arguments of a call that its result holds, and no rule has searched for names."""
    kind = called_kind(call)
    if kind in ("items", "list", "dict"):
        return call.args
    return call.args[3:] if kind in ("from_type", "with_state") else ()


def _is_storage_id(persistent_id: object) -> bool:
    """Tell whether a persistent id stands for a storage, or for nothing, with each of PyTorch's loaders."""
    return isinstance(persistent_id, tuple) and persistent_id[:1] == ("storage",)


def _is_flat(args: tuple[Any, ...]) -> bool:
    """Tell at once what is true of nearly all calls: scalars, storages, tensors, short tuples of numbers."""
    for arg in args:
        kind = type(arg)
        if kind in _SCALARS:
            continue
        if kind is tuple:
            if len(arg) > _SHORT or not _SCALARS.issuperset(map(type, arg)):
                return False
        elif kind is Persistent:
            if not _is_storage_id(arg.id):
                return False
        elif kind is Mapped:
            if arg or arg.state is not None or isinstance(arg.factory, Call):
                return False
        elif kind is not Call or not _is_tensor(arg):
            return False
    return True


def _is_tensor(call: Call) -> bool:
    """Tell at once of a call that it makes a tensor without attributes."""
    return called_kind(call) == "tensor" and call.state is None and not call.items and not call.pairs


def _data(call: Call, charge: Charge, kinds: Collection[str] = ("value",)) -> Trust:
    """Judge a call whose arguments may name nothing but what is of these kinds."""
    if _is_flat(call.args):
        return Trust.PLAIN
    return _worst(*(_judge_argument(name, kinds) for name in _names_in(call.args, charge)))


def _judge_argument(name: Global, kinds: Collection[str]) -> Trust:
    kind = kind_of(name.module, name.name)
    if kind in kinds:
        return Trust.PLAIN
    return Trust.DANGEROUS if kind or stranger(name.module, name.name) is not Trust.UNKNOWN else Trust.UNKNOWN


def _plain_if(is_harmless: bool) -> Trust:
    return Trust.PLAIN if is_harmless else Trust.DANGEROUS


def _worst(*meanings: Trust) -> Trust:
    return max(meanings, key=_WORST.index, default=Trust.PLAIN)


# One rule for each kind ---------------------------------------------------------------------------------


def _never(call: Call, charge: Charge) -> Trust:
    return Trust.DANGEROUS


def _items(call: Call, charge: Charge) -> Trust:
    """A container calls nothing that it holds; its first argument is what that is, in another container."""
    if not call.args:
        return Trust.PLAIN
    charge(_COST_OF_AN_ITEM * sum(len(arg) for arg in call.args if isinstance(arg, list | tuple | dict)))
    return _worst(*map(_judge_content, call.args))


def _judge_content(arg: object) -> Trust:
    if isinstance(arg, Global | Persistent):
        return Trust.DANGEROUS
    if isinstance(arg, Call):
        return _worst(*(_judge_argument(name, ()) for name in _makers_of(arg)))
    if isinstance(arg, list | tuple) and all(isinstance(part, tuple | list) for part in arg):
        names = (part for part in chain.from_iterable(arg) if isinstance(part, Global))
        if any(kind_of(name.module, name.name) == "instance" for name in names):
            return Trust.DANGEROUS
    return Trust.PLAIN


def _new(call: Call, charge: Charge) -> Trust:
    return _plain_if(call.is_new and not call.args)


def _factory(call: Call, charge: Charge) -> Trust:
    """``defaultdict(factory)``, which calls it for a missing key: a class of plain values.

    A partial, of which nobody knows what it calls, is unknown: unpickling looks no key up.
    """
    if not call.args or call.args == (None,):
        return Trust.PLAIN
    factory = call.args[0]
    if len(call.args) == 1 and isinstance(factory, Call) and factory.is_of("functools", "partial"):
        return Trust.UNKNOWN
    if len(call.args) > 1 or not isinstance(factory, Global):
        return Trust.DANGEROUS
    return _judge_argument(factory, ("items", "list", "dict", "data", "constant", "factory", "class"))


def _array(call: Call, charge: Charge) -> Trust:
    """``_reconstruct(class, shape, typecode)``, which makes an array without elements of that class."""
    if len(call.args) != 3 or not isinstance(call.args[0], Global):
        return Trust.DANGEROUS
    made = call.args[0]
    kind = kind_of(made.module, made.name)
    if kind not in (None, "value"):
        return Trust.DANGEROUS
    meaning = Trust.PLAIN if kind else stranger(made.module, made.name)
    return _worst(meaning, _data(Call(call.function, call.args[1:]), charge))


def _tensor_with_state(call: Call, charge: Charge) -> Trust:
    """``_rebuild_parameter_with_state(tensor, requires_grad, hooks, attributes)``."""
    if not all(has_plain_attributes(state, charge) for state in call.args[3:]):
        return Trust.DANGEROUS
    return _data(Call(call.function, call.args[:3]), charge)


def _elements(call: Call, charge: Charge) -> Trust:
    """``_array_reconstructor(array.array, typecode, code, bytes)``."""
    if call.args[:1] != (Global("array", "array"),):
        return Trust.DANGEROUS
    return _data(Call(call.function, call.args[1:]), charge)


def _subclass(call: Call, charge: Charge) -> Trust:
    """``_rebuild_wrapper_subclass(class, dtype, …)``."""
    if not call.args:
        return Trust.DANGEROUS
    return _worst(_judge_class(call.args[0]), _data(Call(call.function, call.args[1:]), charge))


def _from_type(call: Call, charge: Charge) -> Trust:
    """``_rebuild_from_type_v2(function, class, arguments, state)``, which calls the function."""
    args = call.args
    if len(args) not in (3, 4) or not isinstance(args[0], Global) or not isinstance(args[2], tuple):
        return Trust.DANGEROUS
    if kind_of(args[0].module, args[0].name) not in ("tensor", "subclass", "with_state"):
        return Trust.DANGEROUS
    if not all(has_plain_attributes(state, charge) for state in args[3:]):
        return Trust.DANGEROUS
    return _worst(_judge_class(args[1]), judge(Call(args[0], args[2]), charge))


def _from_array(call: Call, charge: Charge) -> Trust:
    """``_reconstruct_array(function, arguments, state, aval)``, which calls the function."""
    args = call.args
    if len(args) != 4 or not isinstance(args[0], Global) or not isinstance(args[1], tuple):
        return Trust.DANGEROUS
    if args[0].name not in _ARRAYS or kind_of(args[0].module, args[0].name) not in ("array", "data"):
        return Trust.DANGEROUS
    return _worst(judge(Call(args[0], args[1]), charge), _data(Call(call.function, args[2:]), charge))


def _judge_class(name: object) -> Trust:
    """Judge the class that a tensor is turned into: that runs nothing but what the class itself brings."""
    if not isinstance(name, Global):
        return Trust.DANGEROUS
    kind = kind_of(name.module, name.name)
    if kind is not None:
        return Trust.PLAIN if kind in ("class", "wrapper") else Trust.DANGEROUS
    return stranger(name.module, name.name)


def _reconstructor(call: Call, charge: Charge) -> Trust:
    """``_reconstructor(class, base, state)``: ``base.__new__(class, state)``."""
    if len(call.args) != 3 or not isinstance(call.args[1], Global):
        return Trust.DANGEROUS
    made, base, state = call.args
    if base == _OBJECT and state is None:
        instance = Call(made, ())
    elif (base.module, base.name) in _BASES:
        instance = Call(made, (state,))
    else:
        return Trust.DANGEROUS
    instance.is_new = True
    return judge(instance, charge)


def _latin1(call: Call, charge: Charge) -> Trust:
    args = call.args
    return _plain_if(
        len(args) == 2 and isinstance(args[0], str | Payload) and args[1] in ("latin1", "latin-1")
    )


def _attribute(call: Call, charge: Charge) -> Trust:
    """``getattr(torch._C._VariableFunctionsClass, "relu")``; unknown of what nobody knows.

    Modules keep bound methods of their own, as hooks.
    """
    if len(call.args) != 2 or not isinstance(call.args[1], str):
        return Trust.DANGEROUS
    if dotted_name(call) is not None:
        return Trust.PLAIN
    target, name = call.args
    if not name.isidentifier() or is_dunder(name):
        return Trust.DANGEROUS
    if isinstance(target, Global) and target in _TENSOR_FUNCTIONS:
        return Trust.DANGEROUS if name in _READS_MEMORY or name.startswith("_") else Trust.PLAIN
    owner = _maker(target) if isinstance(target, Call) else target
    if not isinstance(owner, Global):
        return Trust.DANGEROUS
    kind = kind_of(owner.module, owner.name)
    is_unknown = kind is None and stranger(owner.module, owner.name) is Trust.UNKNOWN
    return Trust.UNKNOWN if is_unknown or kind == "new" else Trust.DANGEROUS


def _partial(call: Call, charge: Charge) -> Trust:
    """``partial(function)``, whose arguments are its state: nobody knows who calls it, and with what.

    The function may be an object: a module, a bound method, a tensor function.
    """
    made = call.args[0] if len(call.args) == 1 else None
    if isinstance(made, Global):
        return Trust.UNKNOWN
    maker = _maker(made) if isinstance(made, Call) else None
    if not isinstance(maker, Global):
        return Trust.DANGEROUS
    kind = kind_of(maker.module, maker.name)
    return Trust.UNKNOWN if kind is None or kind in _GIVE_CALLABLES else Trust.DANGEROUS


def _paddle_eval(call: Call, charge: Charge) -> Trust:
    """Paddle's ``eval("data", {"data": array})``, which gives the array back."""
    if len(call.args) != 2 or call.args[0] != "data" or not isinstance(call.args[1], dict):
        return Trust.DANGEROUS
    names = call.args[1]
    array = names.get("data")
    if list(names) != ["data"] or not isinstance(array, Call) or not isinstance(array.function, Global):
        return Trust.DANGEROUS
    return _plain_if(array.function.name in _ARRAYS)


_KINDS: dict[str, Callable[[Call, Charge], Trust]] = {
    "value": _never,
    "name": _never,
    "new": _new,
    "instance": _new,
    "wrapper": _new,
    "data": _data,
    "constant": _data,
    "same": _data,
    "items": _items,
    "list": _items,
    "dict": _items,
    "class": _data,
    "tensor": _data,
    "with_state": _tensor_with_state,
    "factory": _factory,
    "array": _array,
    "elements": _elements,
    "random": lambda call, charge: _data(call, charge, ("random",)),
    "subclass": _subclass,
    "from_type": _from_type,
    "from_array": _from_array,
    "reconstructor": _reconstructor,
    "latin1": _latin1,
    "none_type": lambda call, charge: _plain_if(call.args == (None,)),
    "attribute": _attribute,
    "partial": _partial,
    "eval": _paddle_eval,
    # A storage that was pickled without `torch.save`; what its bytes hold is judged apart.
    "storage_bytes": lambda call, charge: _plain_if(
        len(call.args) == 1 and isinstance(call.args[0], bytes | Payload)
    ),
    # A helper of a package that is given data, and classes of its kind: unknown, and so is what it makes.
    UNVETTED: lambda call, charge: _worst(Trust.UNKNOWN, _data(call, charge, ("value", UNVETTED))),
}
_GIVE_DATA = _KINDS.keys() - {"value", "name", "new", "instance", "wrapper", "attribute", "partial", UNVETTED}
"""The kinds of calls whose results call nothing of what they hold."""
_GIVE_CALLABLES = frozenset({"attribute", "new", "partial"})
"""The kinds of calls whose results a partial may stand for."""
