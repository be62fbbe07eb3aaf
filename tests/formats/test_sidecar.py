"""The entry: a document that anybody may have written, and what a checkpoint makes of it."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import Checkpoint, LimitExceeded, Role, Tensor
from ckpttool.containers.pickle.pickle_nodes import NDARRAY, NOTHING, Call, DictSubclass, Global
from ckpttool.core.layers import DoubtReason, LayerKind, LayoutDoubt
from ckpttool.formats.content.tree import opaque_nodes
from ckpttool.formats.content.tree_json import decode_tree, encode_tree
from ckpttool.formats.layer_documents import kind_document
from ckpttool.formats.sidecar import ENTRY, apply_sidecar
from tests.support.checkpoints import numbers, of_tensors
from tests.support.checkpoints import tensor as tensor_of
from tests.support.limits import lower_limits

BOTH = {"a": {"$tensor": "a"}, "b": {"$tensor": "b"}}
"""The JSON of a tree that holds all tensors."""


def tensor(name: str) -> Tensor:
    return tensor_of(name, numbers(1), Role.OTHER)


def checkpoint(*names: str) -> Checkpoint:
    """Return a checkpoint as a format without an entry would open it."""
    opened = of_tensors(list(map(tensor, names)), "safetensors")
    return opened.replace(metadata=lambda: {"format": "pt"})


AS_THEY_ARE = {name: {"path": [name], "role": "weights"} for name in ("a", "b")}


def written(content: object, tensors: Mapping[str, object] | None = AS_THEY_ARE, **more: object) -> bytes:
    """Return a document with a content in its JSON form."""
    head = {
        "schema": "ckpttool.content/1",
        "source": "pytorch",
        "tensors": tensors,
        "shared": [],
        "content": content,
    }
    return json.dumps(head | more).encode()


def refused(document: bytes | str) -> str:
    """Return why a document is not used; the checkpoint stays as it is."""
    found = apply_sidecar(checkpoint("a", "b"), document, "the header")
    (finding,) = found.findings
    assert (finding.code, finding.severity.value, finding.where) == ("content-entry", "warning", "the header")
    assert (list(found), found.tree, dict(found.metadata)) == (["a", "b"], None, {"format": "pt"})
    return finding.message


def of_tree(form: object, shared: list[object] | None = None) -> str:
    return refused(written({"tree": form}, shared=shared or []))


# What fits ------------------------------------------------------------------------------------------


def test_tensors_get_their_paths_and_roles_and_ties_come_back() -> None:
    document = {
        "model.a": {"path": ["model", "a"], "role": "weights"},
        "model.b": {"path": ["model", "b"], "role": "weights", "shares_with": "model.a"},
        "optimizer.state.0.m": {"path": ["optimizer", "state", 0, "m"], "role": "optimizer"},
    }
    form = {
        "model": {"a": {"$tensor": "model.a"}, "b": {"$tensor": "model.b"}},
        "optimizer": {"state": {"$dict": [[0, {"m": {"$tensor": "optimizer.state.0.m"}}]]}},
        "epoch": 3,
        "loss": {"$float": "nan"},
    }
    opened = checkpoint("optimizer.state.0.m", "model.a")
    found = apply_sidecar(opened, written({"tree": form}, document), "here")
    assert found.findings == ()
    assert [(one.path, one.role, one.shares_with) for one in found.tensors] == [
        (("model", "a"), Role.WEIGHTS, None),
        (("model", "b"), Role.WEIGHTS, "model.a"),
        (("optimizer", "state", 0, "m"), Role.OPTIMIZER, None),
    ]
    assert found["model.b"].tobytes() == found["model.a"].tobytes()
    tree: Any = found.tree
    assert tree["model"]["b"] is found["model.b"]
    assert found.metadata["epoch"] == 3 and math.isnan(found.metadata["loss"])  # type: ignore[arg-type]
    assert found.training.epoch == 3


def test_metadata_and_native_parts_come_back() -> None:
    data = base64.b64encode(b"\0graph").decode()
    content = {"metadata": {"epoch": 7}, "native": {"tensorflow.object_graph": {"$bytes": data}}}
    found = apply_sidecar(checkpoint("a", "b"), written(content), "here")
    assert dict(found.metadata) == {"epoch": 7}
    assert dict(found.native) == {"tensorflow.object_graph": b"\0graph"}
    assert (found.tree, found.training.epoch) == (None, 7)


def test_conventions_and_layers_come_back() -> None:
    kinds = {
        "plain": LayerKind("Dense"),
        "norm": LayerKind("BatchNormalization", missing=("gamma", "beta")),
        "gru": LayerKind("GRU", reset_after=False),
        "flat": LayerKind("Dense", flattened=(4, 4, 4)),
        "channels": LayerKind("Dense", flattened=(None, 4)),
        "doubted": LayerKind("Dense", doubt=DoubtReason(LayoutDoubt.INPUT_ORDER, "a Permute")),
    }
    layers = {name: kind_document(kind) for name, kind in kinds.items()}
    found = apply_sidecar(checkpoint("a", "b"), written({}, conventions="keras", layers=layers), "the header")
    assert (found.format, found.conventions, found.layers) == ("safetensors", "keras", kinds)
    untold = apply_sidecar(checkpoint("a", "b"), written({}), "the header")
    assert (untold.conventions, untold.layers) == ("safetensors", {})


RESET = " unlike PyTorch's: reset_after is not set"


def test_layers_that_version_0_1_put_into_sentences_are_read() -> None:
    sentences = {
        "linear": LayerKind("linear"),
        "Dense after Flatten": LayerKind("Dense", flattened=()),
        "Dense after Flatten (4, 3, 4)": LayerKind("Dense", flattened=(4, 3, 4)),
        "Dense after Flatten (*, 4)": LayerKind("Dense", flattened=(None, 4)),
        "Dense of unknown wiring": LayerKind("Dense", doubt=DoubtReason(LayoutDoubt.UNWIRED)),
        "LayerNormalization without beta": LayerKind("LayerNormalization", missing=("beta",)),
        "BatchNormalization without gamma and beta": LayerKind("BatchNormalization", ("gamma", "beta")),
        f"GRU{RESET}": LayerKind("GRU", reset_after=False),
        f"GRU{RESET} unlike PyTorch's: a Permute stands before it": LayerKind(
            "GRU", reset_after=False, doubt=DoubtReason(LayoutDoubt.INPUT_ORDER, "a Permute")
        ),
        "Dense unlike PyTorch's: a Reshape takes what it gives": LayerKind(
            "Dense", doubt=DoubtReason(LayoutDoubt.OUTPUT_ORDER, "a Reshape")
        ),
        "Dense unlike PyTorch's: it is joined with what a Flatten gives": LayerKind(
            "Dense", doubt=DoubtReason(LayoutDoubt.JOINED, "a Flatten")
        ),
        "BatchNormalization unlike PyTorch's: it has weights along several axes": LayerKind(
            "BatchNormalization", doubt=DoubtReason(LayoutDoubt.SEVERAL_AXES)
        ),
    }
    layers = {str(at): sentence for at, sentence in enumerate(sentences)}
    found = apply_sidecar(checkpoint("a", "b"), written({}, conventions="keras", layers=layers), "the header")
    assert [*found.layers.values()] == [*sentences.values()]


def test_conventions_that_are_none_are_refused() -> None:
    cases = [
        {"conventions": 1},
        {"conventions": ["keras"]},
        {"conventions": "keras", "layers": ["Dense"]},
        {"conventions": "keras", "layers": {"a": 1}},
        {"conventions": "keras", "layers": {"a": "D" * 1001}},
        {"conventions": "keras", "layers": {"a": {}}},
        *(
            {"conventions": "keras", "layers": {"a": {"class": "Dense", "flattened": shape}}}
            for shape in ([4, -1], [4, None], [None], [None, 4, 4], [1 << 63], ["4"], "4", 4)
        ),
        *(
            {"conventions": "keras", "layers": {"a": f"Dense after Flatten ({shape})"}}
            for shape in ("*", "4, *", "9" * 900)
        ),
        {"conventions": "keras", "layers": {"a": {"class": "Norm", "missing": ["alpha"]}}},
    ]
    for document in cases:
        told = refused(written({}, **document))
        assert "invalid" in told and told.endswith((" of a layer", " or layers")), told


def test_a_format_that_holds_the_tree_keeps_it() -> None:
    opened = checkpoint("a")
    opened = opened.replace(tree=lambda: {"a": opened["a"]})
    document = json.loads(written({"native": {}}))
    del document["tensors"]
    found = apply_sidecar(opened, json.dumps(document), "here")
    assert found.findings == ()
    assert found.tree == {"a": opened["a"]}
    assert dict(found.metadata) == {"format": "pt"}


def test_roles_are_told_to_a_format_that_holds_the_tree() -> None:
    opened = checkpoint("a", "b")
    opened = opened.replace(tree=lambda: {"a": opened["a"], "b": opened["b"], "again": opened["a"]})
    document = written({"training": {"learning_rate": 0.5}}, tensors=None, roles={"a": "optimizer"})
    found = apply_sidecar(opened, document, "here")
    assert found.findings == ()
    assert [(one.name, one.role) for one in found.tensors] == [("a", Role.OPTIMIZER), ("b", Role.OTHER)]
    tree: Any = found.tree
    assert tree["a"] is tree["again"] is found["a"] and tree["b"] is found["b"]
    assert found.training.learning_rate == 0.5


def test_a_tensor_may_be_called_as_the_entry() -> None:
    document = {ENTRY: {"path": ["ckpttool", "content"], "role": "weights"}}
    found = apply_sidecar(checkpoint(ENTRY), written({}, document), "here")
    assert found.findings == ()
    assert found[ENTRY].path == ("ckpttool", "content")
    assert list(apply_sidecar(checkpoint(ENTRY), b"{}", "here")) == [ENTRY]


def test_none_is_told_from_no_tree() -> None:
    found = apply_sidecar(checkpoint(), written({"tree": {"$call": ["types", "NoneType"]}}, {}), "here")
    assert found.findings == ()
    assert isinstance(found.tree, Call) and found.tree.function == NOTHING
    assert (dict(found.metadata), encode_tree(found.tree)[0]) == ({}, {"$call": ["types", "NoneType"]})


def test_a_long_integer_in_a_tree_is_described_in_the_metadata() -> None:
    tree = {**BOTH, "x": {"$int": "0x" + "f" * 20_000}, "y": {"$dict": [[{"$int": "0x" + "f" * 20_000}, 1]]}}
    found = apply_sidecar(checkpoint("a", "b"), written({"tree": tree}), "here")
    assert found.findings == ()
    assert str(found.metadata["x"]).startswith("<integer of 80,000 bits")
    assert found.tree["x"] == (1 << 80_000) - 1  # type: ignore[index]


def test_metadata_that_double_are_not_unfolded(monkeypatch: pytest.MonkeyPatch) -> None:
    lower_limits(monkeypatch, repeats=10_000)
    shared: list[object] = [[1], *([{"$same": at}, {"$same": at}] for at in range(40))]
    assert "repetitions" in refused(written({"metadata": {"x": {"$same": 40}}}, shared=shared))
    deep: list[object] = [[1], *([{"$same": at}] for at in range(1900))]
    assert "deep" in refused(written({"metadata": {"x": {"$same": 1900}}}, shared=deep))
    assert "deep" in refused(written({"tree": {**BOTH, "x": {"$same": 1900}}, "metadata": {}}, shared=deep))


def test_the_forms_of_the_documentation() -> None:
    forms: dict[str, object] = {
        '{"$tuple":[1,2]}': (1, 2),
        '{"$int":"0x20000000000001"}': (1 << 53) + 1,
        '{"$float":"-inf"}': -math.inf,
        '{"$complex":[1.0,{"$float":"inf"}]}': complex(1, math.inf),
        '{"$bytes":"AP8="}': b"\0\xff",
        '{"$text":"7aCA"}': "\ud800",
        '{"$set":[1]}': {1},
        '{"$dict":[[1,"a"]]}': {1: "a"},
        '{"a":[true,null,0.5]}': {"a": [True, None, 0.5]},
        '{"$tensor":"x"}': tensor("x"),
        '{"$global":["torch","float32"]}': Global("torch", "float32"),
    }
    for text, value in forms.items():
        form, shared = encode_tree(value)
        assert json.dumps(form, separators=(",", ":")) == text
        assert shared == []
        assert decode_tree(json.loads(text), [], lambda name: tensor(name)) == value


def test_what_is_shared_comes_before_what_refers_to_it() -> None:
    inner: list[object] = [1]
    form, shared = encode_tree({"a": inner, "b": [inner]})
    assert (form, shared) == ({"a": {"$same": 0}, "b": [{"$same": 0}]}, [[1]])
    made: Any = decode_tree(form, shared, {}.__getitem__)
    assert made["a"] is made["b"][0]


def test_a_call_keeps_all_of_its_parts() -> None:
    call = Call(Global("collections", "deque"), ((), 5))
    call.items = [1, 2]
    form, shared = encode_tree(call)
    made: Any = decode_tree(form, shared, {}.__getitem__)
    assert (made.function, made.args, made.items, made.pairs) == (call.function, ((), 5), [1, 2], [])


def test_a_record_keeps_its_state() -> None:
    record = Call(Global("argparse", "Namespace"), ())
    record.state, record.is_new = {"x": 1}, True
    made: Any = decode_tree(*encode_tree(record), {}.__getitem__)
    assert (made.function, made.args, made.state, made.is_new) == (record.function, (), {"x": 1}, True)


def test_a_mapping_keeps_its_kind_and_state() -> None:
    mapped = DictSubclass(Global("collections", "defaultdict"))
    mapped.update({1: 2, "a": 3})
    mapped.factory, mapped.state = Global("builtins", "list"), {"_metadata": 1}
    made: Any = decode_tree(*encode_tree(mapped), {}.__getitem__)
    assert (made, made.kind, made.factory, made.state) == (mapped, mapped.kind, mapped.factory, mapped.state)


def test_a_tree_may_be_deeper_than_json() -> None:
    deep: Any = 1
    for _ in range(1500):
        deep = [deep]
    made: Any = decode_tree(*encode_tree(deep), {}.__getitem__)
    depth = 0
    while isinstance(made, list):
        made, depth = made[0], depth + 1
    assert (made, depth) == (1, 1500)


# What does not fit -----------------------------------------------------------------------------------


def test_a_document_that_does_not_fit_is_not_used() -> None:
    cases = [
        (b"", "not valid JSON"),
        (b"\xff", "not UTF-8"),
        (b"[]", "its schema is not"),
        (b'{"schema": "ckpttool.content/2"}', "its schema is not"),
        (written([]), "no content"),
        (written({}, {"a": {}}), "it omits the tensor b"),
        (written({}, {"a": {}, "b": {}, "c": {}}), "unknown tensor c"),
        (written({}, {"a": {}, "b": {}, "c": {"shares_with": "d"}}), "unknown tensor c"),
        (written({}, {"c": {"shares_with": "a"}, "a": {}, "b": {}}), "unknown tensor c"),
        (written({}, {"a": {"path": ["b"]}, "b": {}}), "the path of the tensor a is that of another"),
        (written({}, {"a": {"path": [True]}, "b": {}}), "invalid path of the tensor a"),
        (written({}, {"a": {"role": "boss"}, "b": {}}), "boss"),
        (written({}, {"a": 1, "b": {}}), "invalid entry of the tensor a"),
        (written({"metadata": [1]}), "not a dictionary"),
        (written({"metadata": {"x": {"$set": [1]}}}), "the metadata has a set"),
        (written({"metadata": {"x": {"$tensor": "a"}}}), "the metadata has a Tensor"),
        (written({"metadata": {"x": [{"$bytes": "AAAA"}]}}), "the metadata has a bytes"),
        (written({"metadata": {"x": {"$call": ["torch", "Size"]}}}), "the metadata has a Call"),
        (written({"metadata": {"x": {"$dict": [[1, 2]]}}}), "a key that is not text"),
        (written({"metadata": {"x": {"$int": "0x" + "f" * 1025}}}), "an integer of 4,100 bits"),
        (written({"metadata": {"x": [1, {"$int": "0x" + "f" * 20_000}]}}), "an integer of 80,000 bits"),
        (written({"tree": BOTH, "metadata": {"epoch": 1}}), "differs from that of the tree"),
        (written({"tree": {**BOTH, "x": 1}, "metadata": {"x": 1.0}}), "differs from that of the tree"),
        (written({"tree": {"a": BOTH["a"]}}), "the tree lacks the tensor b"),
        (written({"tree": {"a": BOTH["b"], "b": BOTH["a"]}}), "a different tensor at a"),
        (written({"tree": {**BOTH, "c": BOTH["a"]}}), "a different tensor at c"),
        (written({"training": {"epoch": {"$float": "inf"}}}), "an invalid 'epoch'"),
        (written({}, tensors=None, roles={"c": "weights"}), "unknown tensor c"),
        (written({}, tensors=None, roles={"a": "boss"}), "boss"),
        (written({}, tensors=None, roles=["a"]), "the roles are not a dictionary"),
        (written({"native": {"x": 1}}), "invalid native parts"),
        (written({"native": [1]}), "invalid native parts"),
        (written({}, shared={}), "instead of a list"),  # type: ignore[arg-type]
        (written({}).replace(b'"a":', b'"b":', 1), "a duplicate tensor"),
        (b"[" * 100_000, "nested more than"),
    ]
    for document, why in cases:
        assert why in refused(document), why


def test_a_tree_that_makes_no_sense_is_not_used() -> None:
    cases = [
        ({"$tensor": "c"}, "unknown tensor 'c'"),
        ({"$tensor": ["a"]}, "instead of a str"),
        ({"$same": 0}, "doesn't precede it"),
        ({"$same": -1}, "doesn't precede it"),
        ({"$same": True}, "doesn't precede it"),
        ({"$new": 1}, "unknown form"),
        ({"a": 1, "$tensor": "a"}, "unknown form"),
        ({"$dict": [[1]]}, "an invalid pair"),
        ({"$dict": [[1, 2], [1, 3]]}, "a duplicate key"),
        ({"$dict": [[[1], 2]]}, "a list as a key"),
        ({"$dict": [[{"$tuple": [{"$set": []}]}, 2]]}, "a set as a key"),
        ({"$set": [[1]]}, "a list as a key"),
        ({"$set": 1}, "instead of a list"),
        ({"$bytes": "*"}, "invalid base64"),
        ({"$int": "12"}, "not a hexadecimal integer"),
        ({"$int": "0xg"}, "not a hexadecimal integer"),
        ({"$int": "0x_f"}, "not a hexadecimal integer"),
        ({"$float": "one"}, "not a float"),
        ({"$float": "00 00 00 00     "}, "not a float"),
        ({"$complex": [1.0]}, "an invalid pair"),
        ({"$complex": ["1", 2.0]}, "instead of a float"),
        ({"$text": "/w=="}, "can't decode"),
        ({"$opaque": 1}, "instead of a str"),
        ({"$mapping": ["os", "environ"]}, "unknown dictionary type"),
        ({"$call": ["collections"]}, "a name without module and name"),
        ({"$call": ["collections", "deque"], "args": 1}, "instead of a list"),
        ({"$call": ["collections", "deque"], "kwargs": {"maxlen": 1}}, "named arguments"),
        ({"$call": ["numpy", "asarray"], "args": [1]}, "of a non-tensor"),
        ({"$call": ["torch.Tensor", "requires_grad_"], "args": []}, "of a non-tensor"),
        ({"$call": ["torch", "Size"], "state": {"__array_interface__": 1}}, "not known to be harmless"),
        ({"$call": ["torch._utils", "_rebuild_sparse_tensor"], "args": [1, 2]}, "not known to be harmless"),
    ]
    for form, why in cases:
        assert why in of_tree(form), why


NAMES = [
    ("os", "system"),
    ("builtins", "eval"),
    ("builtins", "getattr"),
    ("numpy", "load"),
    ("my", "Model"),
]


def test_a_name_that_is_not_known_to_be_harmless_is_refused() -> None:
    for module, name in NAMES:
        for form in (
            {"$global": [module, name]},
            {"$call": [module, name], "args": ["x"]},
            {"x": [{"$call": ["collections", "deque"], "args": [{"$global": [module, name]}]}]},
            {"$mapping": ["collections", "defaultdict"], "factory": {"$global": [module, name]}},
        ):
            assert f"{module}.{name}, which is not known to be harmless" in of_tree(form), name


def test_shared_parts_that_double_are_not_unfolded(monkeypatch: pytest.MonkeyPatch) -> None:
    lower_limits(monkeypatch, repeats=10_000)
    shared: list[object] = [{"$tuple": [1]}]
    for at in range(60):
        shared.append({"$tuple": [{"$same": at}, {"$same": at}]})
    assert "more than" in of_tree({"$same": 60}, shared)
    assert "a key of more than" in of_tree({"$dict": [[{"$same": 60}, 1]]}, shared)


def test_keys_that_collide_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    lower_limits(monkeypatch, collisions=5)
    modulus = (1 << 61) - 1
    pairs = [[{"$int": hex(at * modulus + 5)}, 1] for at in range(1, 9)]
    with pytest.raises(LimitExceeded, match="one hash"):
        decode_tree({"$dict": pairs}, [], {}.__getitem__)


def test_a_chain_of_references_can_be_no_cycle_and_ends() -> None:
    shared: list[object] = [1]
    for at in range(5000):
        shared.append([{"$same": at}])
    assert "nested" in of_tree({"$same": 5000}, shared)


def test_nested_classes_of_tensors_do_not_recurse() -> None:
    shared: list[object] = [{"$tensor": "a"}]
    for at in range(1500):
        args = [{"$same": at}, {"$global": ["torch", "Tensor"]}, None]
        shared.append({"$call": ["torch._tensor", "_rebuild_from_type_v2"], "args": args})
    assert "a tensor subclass in a tensor subclass" in of_tree({"$same": 1500}, shared)


def test_a_document_that_is_too_large_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    lower_limits(monkeypatch, document=100)
    assert "at most 100 are read" in refused(written({"metadata": {"x": "y" * 100}}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda below: (
        st.lists(below, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "$tuple",
                    "$set",
                    "$dict",
                    "$mapping",
                    "$call",
                    "$global",
                    "$tensor",
                    "$same",
                    "$int",
                    "$float",
                    "$complex",
                    "$bytes",
                    "args",
                    "state",
                    "items",
                    "pairs",
                    "factory",
                    "content",
                    "$opaque",
                    "a",
                ]
            ),
            below,
            max_size=3,
        )
        | st.just(["torch", "Size"])
        | st.just(["collections", "OrderedDict"])
        | st.just(["torch._utils", "_rebuild_qtensor"])
        | st.just({"$tensor": "a"})
    ),
    max_leaves=20,
)


@given(JSON, st.lists(JSON, max_size=2))
def test_any_json_is_used_or_refused(form: object, shared: list[object]) -> None:
    for content in ({"tree": {**BOTH, "x": form}}, {"metadata": form}, {"training": form}, {"native": form}):
        found = apply_sidecar(checkpoint("a", "b"), written(content, shared=shared), "here")
        assert [finding.code for finding in found.findings] in ([], ["content-entry"])
        list(opaque_nodes(found.tree))
        json.dumps([found.metadata, found.training.epoch, sorted(found.native)])


def test_an_array_of_numpy_is_told_as_a_tensor() -> None:
    form = {**BOTH, "a": {"$call": ["numpy", "asarray"], "args": [{"$tensor": "a"}]}}
    found = apply_sidecar(checkpoint("a", "b"), written({"tree": form}), "here")
    tree: Any = found.tree
    assert (tree["a"].function, tree["a"].args) == (NDARRAY, (found["a"],))
    assert dict(found.metadata) == {}
