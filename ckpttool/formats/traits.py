"""The traits of each format, one row a format.

Code outside ``formats/`` asks a format's row and doesn't compare its name. The few exceptions are listed in
``tests/test_house.py``, each with its reason.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

from ckpttool.formats.content.plain_data import RECORDS


class Family(enum.Enum):
    """Framework whose names and layouts weights have."""

    TORCH = enum.auto()
    KERAS = enum.auto()
    PADDLE = enum.auto()


class Program(NamedTuple):
    """A program in a checkpoint, which no other format can hold.

    Attributes:
        key: Key of the metadata that describes it.
        name: Its name in messages.
        path: Its file or record.
        content: Its content that a conversion loses, for messages.
    """

    key: str
    name: str
    path: str
    content: str


class Traits(NamedTuple):
    """Traits of one format; the defaults are those of most.

    Attributes:
        title: Name of the format in messages; empty if it is the key of the row.
        readers: Classes that open it, as ``module:Class`` of ``formats/``, each with the kinds of content
            (``Probe.kinds``) that it may have; ``set`` if its checkpoints are several entries of a directory.
            Only readers of a probe's kinds are imported and asked.
        record: Pattern of the name of a record, from the root of a zip or below its only directory, that
            every zip of this format has; its readers aren't asked about other zips. Empty if there is none.
        writer: Class that writes it, as ``module:Class`` of ``formats/``; empty if it can't be written.
        checkpoint_list: Kind of file in which the framework lists the checkpoints of a directory, as
            ``module:Class`` of ``formats/``.
        suffixes: Suffixes of a target's name that mean it; the longest of all formats counts.
        model_suffixes: Suffixes that mean it if the model's architecture is known.
        family: Framework whose names and layouts its weights have; in plain containers, most often PyTorch.
        dialect: Formats of one dialect have the same metadata keys; empty if no other format shares its keys.
        varies: Whether some of its variants hold only weights, so that each variant is a dialect.
        nests_state_dicts: Whether state dicts may be values of keys in another dictionary.
        holds_layers: Whether its top level has the model's layers; their variables may have numbers instead
            of names.
        has_object_graph: Whether variables are found through a graph of objects, where one may be listed
            several times.
        is_container: Whether it may hold anything, so that names of tensors don't identify a model.
        holds_tensors_alone: Whether it has only tensors and text about them.
        has_some_checksums: Whether some of its files have the checksums of all.
        counts_epochs_from_one: Whether Keras may have written it; Keras counts epochs from 1, but from 0 in
            its logs.
        is_part_of_others: Whether directories of other formats may consist of it: adapters, parts of a
            pipeline, shards.
        has_directories: Whether its parts are in subdirectories, and look like checkpoints there.
        program: The program in it, if any.
        program_variants: Variants that have the program; empty for all.
        unread_files: Keys of the metadata that list unread files.
        file_metadata: Keys of the metadata that describe its files, and aren't kept in a conversion.
        own_keys: Keys of the metadata that it writes itself; in other formats they are the user's.
        rewritten: Variants of files that its writer writes in the same form.
        known_directories: Variants that are directories with known members.
        members: Pattern of the members of such a directory, if its reader lists them all.
        library: The library that loads it, by its name in Hugging Face's model cards.
        loaders: Python code that loads ``NAME`` with its framework, without running code in it, by variant.
    """

    title: str = ""
    readers: Mapping[str, str] = {}
    record: str = ""
    writer: str = ""
    checkpoint_list: str = ""
    suffixes: tuple[str, ...] = ()
    model_suffixes: tuple[str, ...] = ()
    family: Family = Family.TORCH
    dialect: str = ""
    varies: bool = False
    nests_state_dicts: bool = False
    holds_layers: bool = False
    has_object_graph: bool = False
    is_container: bool = False
    holds_tensors_alone: bool = False
    has_some_checksums: bool = False
    counts_epochs_from_one: bool = False
    is_part_of_others: bool = False
    has_directories: bool = False
    program: Program | None = None
    program_variants: frozenset[str] = frozenset()
    unread_files: tuple[str, ...] = ()
    file_metadata: frozenset[str] = frozenset()
    own_keys: frozenset[str] = frozenset()
    rewritten: frozenset[str | None] = frozenset()
    known_directories: frozenset[str | None] = frozenset()
    members: re.Pattern[str] | None = None
    library: str = ""
    loaders: Mapping[str | None, str] = {}

    def program_in(self, variant: str | None) -> Program | None:
        """Return the program in a checkpoint of a variant."""
        return self.program if not self.program_variants or variant in self.program_variants else None


_COMPUTATION = Program("program", "the program", "program", "the computation")
_SAVED_MODEL = re.compile(
    r"saved_model\.(pb|pbtxt|cpb)|fingerprint\.pb|keras_metadata\.pb|(assets|assets\.extra)/.*"
    r"|variables/variables\.(index|data-[0-9]{5}-of-[0-9]{5})",
    re.DOTALL,
)

_COMMIT_MARKER = re.compile(
    r"\.metadata|_SUCCESS|saved_model\.pb(txt)?|.*[._-]index(\.fp16|\.[a-z]+)?\.json|.*\.index|.*\.weights\.json"
    r"|trainer_state\.json|commit_success\.txt",
    re.DOTALL,
)


def is_commit_marker(name: str) -> bool:
    """Return whether a checkpoint is incomplete without a file of this name."""
    return _COMMIT_MARKER.fullmatch(name) is not None


TRAITS: Mapping[str, Traits] = {
    "pytorch": Traits(
        library="pytorch",
        loaders=dict.fromkeys(
            ("zip", "legacy"), "import torch\n\ncheckpoint = torch.load(NAME, weights_only=True)"
        ),
        title="PyTorch",
        readers={
            "torch.zip:PytorchZip": "zip",
            "pickles:PytorchLegacy": "pickle other",
            "torch.tar:PytorchTar": "tar",
            "sharded:ShardedPytorch": "json directory set",
            "torch.deepspeed:DeepSpeed": "directory",
            "torch.ranks_format:RankFiles": "prefix directory set",
        },
        writer="torch.writer:PyTorchWriter",
        suffixes=(".pt", ".pth", ".pth.tar", ".ckpt", ".bin"),
        dialect="objects",
        nests_state_dicts=True,
        is_container=True,
        is_part_of_others=True,
        rewritten=frozenset({"zip"}),
        known_directories=frozenset({"sharded"}),
    ),
    "safetensors": Traits(
        loaders={None: "from safetensors.torch import load_file\n\nweights = load_file(NAME)"},
        readers={
            "safetensors.reader:Safetensors": "json",
            "sharded:ShardedSafetensors": "json directory set",
            "hf_trainer:HfTrainer": "directory",
            "torch.dcp_safetensors:DcpConsolidated": "directory",
        },
        writer="safetensors.writer:SafetensorsWriter",
        suffixes=(".safetensors",),
        holds_tensors_alone=True,
        is_part_of_others=True,
        file_metadata=frozenset({"total_parameters", "total_size"}),
        rewritten=frozenset({None}),
        known_directories=frozenset({"sharded"}),
    ),
    "tensorflow": Traits(
        library="tf-keras",
        loaders={None: "import tensorflow as tf\n\nreader = tf.train.load_checkpoint(NAME)"},
        title="TensorFlow",
        readers={"tensorflow.checkpoint:TensorFlow": "table other directory set"},
        writer="tensorflow.writer:TensorFlowWriter",
        checkpoint_list="tensorflow.checkpoint_list:TensorFlowState",
        suffixes=(".index",),
        family=Family.KERAS,
        has_object_graph=True,
        has_some_checksums=True,
        counts_epochs_from_one=True,
    ),
    "savedmodel": Traits(
        library="tf-keras",
        loaders={None: "import tensorflow as tf\n\nmodel = tf.saved_model.load(NAME)"},
        title="SavedModel",
        readers={"savedmodel.directory:SavedModelDirectory": "other directory set"},
        writer="savedmodel.writer:SavedModelWriter",
        family=Family.KERAS,
        has_object_graph=True,
        has_some_checksums=True,
        has_directories=True,
        program=Program("graph", "the graph", "saved_model.pb", "the graph, its functions and signatures"),
        unread_files=("files",),
        file_metadata=frozenset(
            {"constant_bytes", "file", "files", "fingerprint", "graph", "meta_graphs", "schema_version"}
        ),
        own_keys=frozenset({"file", "fingerprint", "schema_version"}),
        known_directories=frozenset({"v1", "v2"}),
        members=_SAVED_MODEL,
    ),
    "keras": Traits(
        library="keras",
        loaders={None: "import keras\n\nmodel = keras.saving.load_model(NAME)"},
        title="Keras",
        readers={"keras.zip:KerasZip": "zip"},
        record=r"config\.json",
        writer="keras.writer:KerasWriter",
        suffixes=(".keras",),
        family=Family.KERAS,
        holds_layers=True,
        counts_epochs_from_one=True,
        unread_files=(RECORDS,),
        own_keys=frozenset({"backend"}),
        rewritten=frozenset({None}),
    ),
    "keras-h5": Traits(
        library="keras",
        title="Keras HDF5",
        readers={"keras.h5:KerasH5": "hdf5", "keras.sharded:KerasSharded": "json directory set"},
        writer="keras.writer:KerasH5Writer",
        suffixes=(".weights.h5",),
        model_suffixes=(".h5",),
        family=Family.KERAS,
        varies=True,
        holds_layers=True,
        counts_epochs_from_one=True,
        own_keys=frozenset({"backend"}),
        rewritten=frozenset({"model", "weights"}),
        known_directories=frozenset({"sharded"}),
    ),
    "hdf5": Traits(
        loaders={None: "import h5py\n\nfile = h5py.File(NAME)"},
        title="HDF5",
        readers={"hdf5.plain:Hdf5": "hdf5"},
        writer="hdf5.writer:Hdf5Writer",
        suffixes=(".h5", ".hdf5"),
        is_container=True,
        counts_epochs_from_one=True,
    ),
    "numpy": Traits(
        loaders={"npz": "import numpy as np\n\narrays = np.load(NAME)"},
        title="NumPy",
        readers={"arrays.files:Npy": "numpy", "arrays.files:Npz": "zip"},
        record=r".*\.npy|ckpttool\.content",
        writer="arrays.npz_writer:NpzWriter",
        suffixes=(".npz",),
        is_container=True,
    ),
    "fluid": Traits(
        library="paddlepaddle",
        title="Paddle Fluid",
        readers={"paddle.fluid:Fluid": "directory"},
        writer="paddle.fluid_writer:FluidWriter",
        family=Family.PADDLE,
        varies=True,
        has_directories=True,
        program=_COMPUTATION,
        program_variants=frozenset({"inference"}),
        own_keys=frozenset({"serial"}),
        known_directories=frozenset({"checkpoint", "variables"}),
    ),
    "torch-dcp": Traits(
        library="pytorch",
        title="PyTorch DCP",
        readers={"torch.dcp:TorchDcp": "directory", "torch.dcp_safetensors:DcpSafetensors": "directory"},
        writer="torch.dcp_writer:TorchDcpWriter",
        dialect="objects",
        nests_state_dicts=True,
        has_some_checksums=True,
        is_part_of_others=True,
        known_directories=frozenset({None, "safetensors"}),
    ),
    "paddle": Traits(
        library="paddlepaddle",
        title="Paddle",
        readers={"pickles:PaddlePickle": "pickle other", "paddle.files:PaddleFiles": "json other set"},
        family=Family.PADDLE,
        varies=True,
        nests_state_dicts=True,
        is_container=True,
        program=_COMPUTATION,
        program_variants=frozenset({"inference", "training"}),
        own_keys=frozenset({"StructuredToParameterName@@"}),
    ),
    "pickle": Traits(
        readers={"pickles:PlainPickle": "pickle compressed other"},
        dialect="objects",
        nests_state_dicts=True,
        is_container=True,
        is_part_of_others=True,
    ),
    "torchscript": Traits(
        library="pytorch",
        loaders={None: "import torch\n\nmodel = torch.jit.load(NAME)"},
        title="TorchScript",
        readers={"torch.torchscript:TorchScript": "zip"},
        record=r"constants\.pkl",
        program=Program("code", "the code", "code", "the program"),
        unread_files=("extra", RECORDS),
    ),
    "torch-export": Traits(
        library="pytorch",
        title="torch.export",
        readers={"torch.export:TorchExport": "zip"},
        record=r"archive_format|models/.*|serialized_exported_program\.json",
        program=Program("models", "the exported graph", "models", "the program"),
        unread_files=(RECORDS,),
        own_keys=frozenset({"schema_version", "opset_version"}),
    ),
    "stable-baselines3": Traits(
        library="stable-baselines3",
        title="Stable-Baselines3",
        readers={"torch.stable_baselines:StableBaselines": "zip"},
        record="_stable_baselines3_version",
    ),
}
"""Those of each format, by its name; those that can be written first."""

_OTHERS = Traits()


def class_at(class_path: str) -> Any:
    """Return a class of ``formats/`` by its ``module:Class``, importing the module."""
    module, _, name = class_path.partition(":")
    return getattr(import_module(f".{module}", __package__), name)


def traits_of(format: str) -> Traits:
    """Return the traits of a format; the defaults for one of another package."""
    return TRAITS.get(format, _OTHERS)
