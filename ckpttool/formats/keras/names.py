"""Names in Keras 2 and 3 that a configuration may use; the lists are in ``lists/``, one name a line.

``fixtures/make_keras_names.py`` writes them from the real Keras and TensorFlow.
"""

from __future__ import annotations

from pathlib import Path

from ckpttool.core.name_lists import lines_of

_LISTS = Path(__file__).with_name("lists")
_ROOTS = ("keras", "tf_keras", "tensorflow.keras", "tensorflow.python.keras")


def _names(file: str) -> frozenset[str]:
    return frozenset(lines_of(_LISTS / file))


CLASSES = _names("classes.txt")
"""Classes that only compute when a configuration builds them."""

ARGUMENTS = _names("arguments.txt")
"""Arguments of these classes, taken together."""

OPERATIONS = _names("operations.txt")
"""Classes of ``keras.ops`` for symbolic tensors, without those that take a function."""

FUNCTIONS = _names("functions.txt")
"""Activations, losses, metrics, initializers … that are functions."""

OPS = _names("ops.txt")
"""Functions of ``keras.ops``, without those that take a function."""

LOOKUPS = _names("lookups.txt")
"""Other names that a look-up in Keras's modules finds by accident, such as functions that load."""

TENSORFLOW = _names("tensorflow.txt")
"""TensorFlow's functions that only compute, under the names that a layer of Keras 2 calls them by."""

TYPESPECS = _names("typespecs.txt")
"""Modules and names of TensorFlow's type specifications, and the names under which they are registered."""

BY_NAME = CLASSES | FUNCTIONS | {name.lower() for name in CLASSES}
"""Bare names that Keras resolves as an activation, a loss, an optimizer …"""

DATA = frozenset(
    (
        *("__bytes__", "__complex__", "__dtype__", "__ellipsis__", "__keras_tensor__", "__numpy__"),
        *("__set__", "__slice__", "__tensor__", "__tuple__", "CompositeTensor", "Tensor", "TensorShape"),
    )
)
"""Classes in a configuration that are plain data."""

PARTS = frozenset(
    (
        *("_legacy", "activations", "constraints", "distillation", "dtype_policies", "engine"),
        *("initializers", "layers", "legacy", "losses", "metrics", "mixed_precision", "models", "ops"),
        *("optimizer", "optimizers", "quantizers", "random", "regularizers"),
    )
)
"""The parts of Keras whose classes a config may name; others hold functions that read files and load code."""

TORCH_OPTIMIZERS = frozenset(
    f"keras.src.backend.torch.optimizers.torch_{name.lower()}.{name}"
    for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Lion", "Nadam", "RMSprop", "SGD")
)
"""Names of Keras's optimizers if PyTorch is its backend."""

FUNCTION_PARTS = frozenset(
    ["activations", "constraints", "initializers", "losses", "metrics", "regularizers"]
)
"""The parts of Keras whose functions a config may name."""

LOOKED_UP = frozenset(
    ["activation", "fn", "loss", "metrics", "optimizer", "recurrent_activation", "weighted_metrics"]
)
"""Keys of a config below which Keras looks strings up as names of its functions and classes."""

LOOKED_UP_ENDS = ("_activation", "_constraint", "_initializer", "_regularizer")
"""Suffixes of other such keys."""

RUNNING = {
    "TorchModuleWrapper": "unpickles a PyTorch module",
    "TFSMLayer": "loads a SavedModel from a path",
    "JaxLayer": "runs a function from the config",
    "FlaxLayer": "runs a function from the config",
}
"""Layers of Keras that run other code, with the effect of each."""

RAGGED_MAKERS = frozenset(
    (
        *("from_nested_row_lengths", "from_nested_row_splits", "from_nested_value_rowids"),
        *("from_row_lengths", "from_row_limits", "from_row_splits", "from_row_starts", "from_sparse"),
        *("from_tensor", "from_uniform_row_length", "from_value_rowids"),
    )
)
"""Methods of the class ``RaggedTensor`` that a layer of Keras 2 may call; of other classes, none."""

ATTRIBUTES = frozenset(
    (
        *("bounding_shape", "consumers", "dense_shape", "flat_values", "indices", "merge_dims"),
        *("nested_row_lengths", "nested_row_splits", "nested_value_rowids", "nrows", "nvals"),
        *("ragged_rank", "row_lengths", "row_limits", "row_splits", "row_starts", "to_sparse", "to_tensor"),
        *("uniform_row_length", "value_rowids", "values", "with_flat_values", "with_row_splits_dtype"),
        *("with_values",),
    )
)
"""Attributes and methods of tensors that layers of Keras 2 may read and call."""

VOCABULARIES = frozenset({"StringLookup", "IntegerLookup", "IndexLookup", "TextVectorization"})
"""Layers whose ``vocabulary`` may be the name of a file to read."""

FILES = frozenset({"ckpt_to_load_from", "vocabulary_file"})
"""Keys of feature columns that name files to read."""


SIZES = {
    **dict.fromkeys(("units", "filters", "input_dim", "output_dim"), 1),
    **dict.fromkeys(("num_heads", "key_dim", "value_dim", "num_thresholds"), 1),
    "num_classes": 2,
}
"""Keys with a number of values that an object allocates; the value is the exponent: 2 for a matrix."""

PATTERNS = frozenset(["exclude_layers", "policy_map", "optimizer_map"])
"""Keys with regular expressions, in a list or as keys, that are matched with the paths of variables."""


_INITIALIZERS = "tensorflow.python.ops.init_ops_v2"
"""Module of the initializers of Keras 2."""


def part_of_keras(module: str) -> str | None:
    """Return the part of Keras that a module belongs to: "layers"; "" for the top, None outside Keras."""
    if module == _INITIALIZERS:
        return "initializers"
    for root in _ROOTS:
        if module == root:
            return ""
        if module.startswith(f"{root}."):
            parts = [
                part
                for part in module[len(root) + 1 :].split(".")
                if part not in ("src", "api", "_v2", "keras")
            ]
            return parts[0] if parts else ""
    return None
