"""What the globals of pickles mean: honest ones, the gadgets of published attacks, and disguises."""

from __future__ import annotations

import collections
import datetime
import functools
import operator
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core.report import has_errors
from ckpttool.io import trust as under_test
from ckpttool.io.calls import judge
from ckpttool.io.pickle_nodes import Call, Global, Mapped
from ckpttool.io.trust import CALLED_ONLY, UNVETTED, Trust, kind_of, modern, trust
from tests.support.containers import pickles_in

NAMES = Path(under_test.__file__).with_name("names")
NOT_PLAIN = {Trust.DANGEROUS, Trust.KNOWN}


def entries(file: str) -> list[str]:
    lines = (NAMES / file).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


ROWS = [line.split() for line in entries("allowed.txt")]
EXACT = [(kind, module, name) for kind, module, *names in ROWS for name in names if name != "*"]
FAMILIES = [(kind, module) for kind, module, *names in ROWS if names == ["*"]]
PLAIN = [(module, name) for kind, module, name in EXACT if kind not in CALLED_ONLY | {UNVETTED}]
UNVETTED_NAMES = [(module, name) for kind, module, name in EXACT if kind == UNVETTED]
SHAPED = [(module, name) for kind, module, name in EXACT if kind in CALLED_ONLY]
KNOWN = entries("stdlib.txt") + entries("packages.txt")


def called(module: str, name: str, *args: object, is_new: bool = False) -> Trust:
    call = Call(Global(module, name), args)
    call.is_new = is_new
    return judge(call)


def each(text: str) -> list[tuple[str, str]]:
    """Return the pairs that lines of a module and some names in it make."""
    rows = [line.split() for line in text.strip().splitlines()]
    return [(module, name) for module, *names in rows for name in names]


SAVED_MODULE = each(
    """
    __builtin__ set
    collections OrderedDict
    torch FloatStorage LongStorage
    torch._C _VariableFunctionsClass
    torch._C._nn gelu
    torch._utils _rebuild_parameter _rebuild_tensor_v2
    torch.nn.functional relu
    torch.nn.modules.activation MultiheadAttention ReLU
    torch.nn.modules.batchnorm BatchNorm2d
    torch.nn.modules.container ModuleDict ModuleList Sequential
    torch.nn.modules.conv Conv2d
    torch.nn.modules.dropout Dropout
    torch.nn.modules.linear Linear NonDynamicallyQuantizableLinear
    torch.nn.modules.module _WrappedHook
    torch.nn.modules.normalization LayerNorm
    torch.nn.modules.rnn LSTM
    torch.nn.modules.sparse Embedding
    torch.nn.modules.transformer TransformerEncoderLayer
    torch.nn.utils.spectral_norm SpectralNorm SpectralNormLoadStateDictPreHook SpectralNormStateDictHook
    torch.nn.utils.weight_norm WeightNorm
    """
)
"""What torch.save writes for whole modules."""

HONEST = each(
    """
    builtins bool bytearray bytes complex dict float frozenset int list object range set slice str tuple
    collections Counter OrderedDict defaultdict deque
    argparse Namespace
    types SimpleNamespace
    datetime date datetime timedelta timezone
    decimal Decimal
    fractions Fraction
    pathlib PosixPath WindowsPath
    pathlib._local PosixPath
    uuid UUID
    numpy dtype ndarray
    numpy.core.multiarray _reconstruct scalar
    numpy._core.multiarray _reconstruct scalar
    numpy._core.numeric _frombuffer
    numpy.dtypes Float64DType UInt32DType
    numpy.random._pickle __bit_generator_ctor __generator_ctor __randomstate_ctor
    torch BFloat16Storage Size bfloat16 device float8_e4m3fn per_channel_affine sparse_coo
    torch._tensor _rebuild_from_type_v2
    torch._utils _rebuild_meta_tensor_no_storage _rebuild_nested_tensor _rebuild_parameter_with_state
    torch._utils _rebuild_qtensor _rebuild_sparse_tensor _rebuild_tensor _rebuild_tensor_v3
    torch._utils _rebuild_device_tensor_from_numpy _rebuild_wrapper_subclass _rebuild_xla_tensor
    torch.cuda FloatStorage FloatTensor
    torch.serialization _get_layout
    torch.storage TypedStorage UntypedStorage
    torch.torch_version TorchVersion
    torch.nn.parameter Buffer Parameter
    torch.nn.parallel.data_parallel DataParallel
    torch.nn.backends.thnn _get_thnn_function_backend
    torch.nn.quantized.modules.linear Linear LinearPackedParams
    torch.ao.nn.quantized.dynamic.modules.rnn LSTM PackedParameter
    torch.ao.nn.quantized.modules.conv Conv2d
    torch.optim.adam Adam
    torch.optim.sgd SGD
    torch.optim.lr_scheduler LambdaLR LRScheduler StepLR _LRScheduler
    torch.optim.swa_utils AveragedModel
    torch.amp.grad_scaler GradScaler _refresh_per_optimizer_state
    torch.distributed.checkpoint.metadata BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex
    torch.distributed.checkpoint.metadata StorageMeta TensorProperties TensorStorageMetadata
    torch.distributed.checkpoint.metadata _MEM_FORMAT_ENCODING
    torch.distributed.checkpoint.filesystem _StorageInfo
    torch.distributed.tensor DTensor
    torch.distributed.tensor._dtensor_spec DTensorSpec TensorMeta
    torch.distributed.tensor.placement_types Partial Replicate Shard
    torch.distributed._shard.sharded_tensor.api ShardedTensor
    torch.jit._pickle build_intlist restore_type_tag
    transformers.training_args OptimizerNames
    transformers.trainer_utils HubStrategy IntervalStrategy SaveStrategy SchedulerType
    accelerate.utils.dataclasses DistributedType
    deepspeed.runtime.fp16.loss_scaler LossScaler
    deepspeed.runtime.zero.config ZeroStageEnum
    deepspeed.utils.tensor_fragment fragment_address
    lightning.fabric.utilities.data AttributeDict
    pytorch_lightning.callbacks.early_stopping EarlyStopping
    omegaconf.base ContainerMetadata
    omegaconf.dictconfig DictConfig
    omegaconf.listconfig ListConfig
    omegaconf.nodes AnyNode
    typing Any
    torchvision.models.resnet BasicBlock ResNet
    """
)

PYTHON_2 = each(
    """
    __builtin__ bytearray complex dict int list long object set slice str tuple unicode xrange
    UserDict IterableUserDict UserDict
    UserList UserList
    """
)

GADGETS = each(
    """
    os _exit execv kill popen putenv remove spawnlp startfile system unlink
    posix execv popen remove system
    nt execv popen startfile system
    subprocess Popen call check_call check_output getoutput getstatusoutput run
    _posixsubprocess fork_exec
    _winapi CreateProcess
    winreg SetValueEx
    pty fork spawn
    commands getoutput getstatusoutput
    popen2 popen2 popen3
    runpy _run_code run_module run_path
    builtins __import__ breakpoint compile delattr exec execfile globals input map open print setattr vars
    __builtin__ __import__ apply compile execfile file input map open reduce reload
    builtins apply classmethod filter help iter memoryview next property super zip
    webbrowser open open_new
    antigravity geohash
    this s
    socket create_connection socket
    _socket socket
    socketserver TCPServer
    ssl get_server_certificate
    http.client HTTPConnection HTTPSConnection
    http.server test
    httplib HTTPConnection
    urllib.request Request urlopen urlretrieve
    urllib urlopen urlretrieve
    urllib2 urlopen
    ftplib FTP
    smtplib SMTP
    telnetlib Telnet
    xmlrpc.client ServerProxy
    xmlrpclib ServerProxy
    asyncio create_subprocess_shell run
    asyncio.unix_events _UnixSubprocessTransport._start
    code InteractiveInterpreter InteractiveInterpreter.runcode interact
    codeop compile_command
    timeit main repeat timeit
    cProfile run runctx
    profile Profile.run Profile.runctx run
    pdb Pdb run runeval
    bdb Bdb Bdb.run Bdb.runeval
    trace Trace.run Trace.runctx
    ctypes CDLL CFUNCTYPE cast pythonapi string_at windll
    _ctypes dlopen
    idlelib.autocomplete AutoComplete.fetch_completions AutoComplete.get_entity
    idlelib.calltip Calltip.fetch_tip get_entity
    idlelib.debugobj ObjectTreeItem.SetText
    idlelib.pyshell ModifiedInterpreter.runcode ModifiedInterpreter.runcommand
    idlelib.run Executive.runcode
    lib2to3.pgen2.grammar Grammar.loads
    lib2to3.pgen2.pgen ParserGenerator.make_label
    ensurepip _run_pip bootstrap
    venv EnvBuilder create main
    distutils.file_util copy_file write_file
    distutils.spawn spawn
    doctest debug_script testfile
    pydoc locate pipepager
    unittest main
    test.support.script_helper assert_python_ok
    multiprocessing Process
    multiprocessing.util spawnv_passfds
    concurrent.futures ProcessPoolExecutor
    threading Thread Timer
    _thread start_new_thread
    sched scheduler
    signal signal
    atexit register
    importlib __import__ import_module reload
    importlib.util find_spec module_from_spec
    _frozen_importlib _call_with_frames_removed
    imp load_dynamic load_source
    _imp create_dynamic
    zipimport zipimporter
    pkgutil get_data get_loader resolve_name
    logging FileHandler
    logging.config _resolve dictConfig fileConfig listen
    mailcap findmatch
    shutil copyfile move rmtree
    tempfile NamedTemporaryFile mkdtemp
    glob glob
    fileinput input
    sqlite3 connect
    dbm open
    shelve open
    _io FileIO open open_code
    io FileIO TextIOWrapper open
    codecs open
    tarfile open
    zipfile ZipFile
    pickle Unpickler load loads
    _pickle Unpickler load loads
    cPickle loads
    marshal load loads
    copyreg __newobj__ add_extension pickle
    copy_reg add_extension
    copy copy deepcopy
    operator attrgetter call getitem itemgetter methodcaller setitem
    _operator attrgetter itemgetter methodcaller
    functools partial partialmethod reduce singledispatch
    _functools partial reduce
    itertools starmap
    types BuiltinFunctionType CodeType FunctionType MethodType ModuleType new_class
    weakref finalize
    collections namedtuple
    typing ForwardRef get_type_hints
    dataclasses make_dataclass
    enum EnumMeta
    contextlib ExitStack
    sys _getframe exit modules path setprofile settrace
    gc get_objects get_referrers
    inspect getattr_static getmembers
    linecache getline updatecache
    site addsitedir main
    ast literal_eval parse
    string Formatter
    yaml load unsafe_load
    numpy fromfile fromregex load memmap savez
    numpy.f2py.crackfortran _eval_length getlincoef myeval
    numpy.f2py.diagnose run_command
    numpy.testing._private.utils runstring
    numpy.ctypeslib as_array load_library
    numpy.distutils.exec_command exec_command
    numpy.lib.npyio load loadtxt
    numpy.lib.stride_tricks as_strided
    torch compile from_file import_ir_module load save
    torch._C _VariableFunctions _load_for_lite_interpreter import_ir_module
    torch._utils _import_dotted_name
    torch._dynamo.guards GuardBuilder.get
    torch._inductor.codecache compile_file
    torch.distributed.rpc init_rpc rpc_sync
    torch.distributed.distributed_c10d _object_to_tensor _tensor_to_object init_process_group
    torch.fx.experimental.symbolic_shapes ShapeEnv.evaluate_guards_expression
    torch.fx.graph_module GraphModule _deserialize_graph_module reduce_graph_module
    torch.hub load load_state_dict_from_url
    torch.jit load script
    torch.jit._script unpackage_script_module
    torch.jit.unsupported_tensor_ops execWrapper
    torch.multiprocessing.reductions rebuild_storage_filename
    torch.ops load_library
    torch.package PackageImporter
    torch.serialization load
    torch.nn.cpp ModuleWrapper
    torch.nn.functional os
    torch.nn.modules.module warnings
    torch.ao.quantization.fx.graph_module ObservedGraphModule
    torch.utils._config_module ConfigModule.load_config
    torch.utils.bottleneck.__main__ run_autograd_prof run_cprofile
    torch.utils.collect_env run
    torch.utils.cpp_extension load load_inline
    torch.utils.data.datapipes.utils.decoder basichandlers
    torch.utils.model_zoo load_url
    tensorflow load_library load_op_library py_function
    tensorflow.python.framework.load_library load_op_library
    tensorflow.keras.models load_model
    keras.models load_model
    keras.src.layers.core.lambda_layer Lambda
    keras.utils get_file
    paddle load
    mxnet.ndarray load
    onnxruntime InferenceSession
    jax.experimental.host_callback call
    joblib load
    joblib._parallel_backends LokyBackend
    sklearn.utils gen_batches
    scipy.io loadmat
    pandas eval read_csv read_pickle
    pandas.core.computation.eval eval
    pandas.io.pickle read_pickle
    dill load loads
    dill._dill _create_function _import_module _load_type
    cloudpickle loads
    cloudpickle.cloudpickle _builtin_type _make_function subimport
    numba.core.serialize _rebuild_function
    pip main
    pip._internal main
    pip._internal.cli.main main
    setuptools sandbox.run_setup
    setuptools._distutils.spawn spawn
    pkg_resources run_script
    wheel.cli main
    requests get
    requests.api get post
    urllib3 PoolManager
    aiohttp ClientSession
    jinja2 Environment Template
    jinja2.sandbox SandboxedEnvironment
    flask Flask
    django.core.management execute_from_command_line
    ray remote
    dask compute
    fsspec open
    huggingface_hub hf_hub_download
    transformers AutoModel pipeline
    transformers.dynamic_module_utils get_class_from_dynamic_module
    datasets load_dataset
    accelerate.utils.other load
    deepspeed init_inference
    lightning.pytorch Trainer
    pytorch_lightning.core.saving load_from_checkpoint
    torchvision.io read_file
    torchaudio load
    fastai.learner load_learner
    h5py File
    PIL.Image open
    cv2 imread imwrite
    matplotlib.pyplot savefig
    IPython embed
    IPython.utils.process system
    jupyter_client KernelManager
    click edit launch
    tqdm.contrib.telegram tqdm
    fire Fire
    invoke run
    omegaconf OmegaConf
    hydra.utils instantiate
    """
)

DISGUISES_OF_KNOWN = [
    ("torch.serialization", "os.system"),
    ("torch._utils", "os"),
    ("torch._utils", "_rebuild_tensor_v2.__globals__"),
    ("torch._utils", "_rebuild_tensor_v2 "),
    ("torch._utils", " _rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v2\0"),
    ("torch._utils", "_rebuild_tensor_v2\n"),
    ("torch._utils", "_REBUILD_TENSOR_V2"),
    ("torch._utils.", "_rebuild_tensor_v2"),
    ("torch._utils\0", "_rebuild_tensor_v2"),
    ("torch._utils _rebuild_tensor_v2", ""),
    ("torch", "_utils._rebuild_tensor_v2"),
    ("torch.nn", "modules.linear.Linear"),
    ("torch.nn.modules.linear.Linear", "forward"),
    ("torch.nn.modules.linear", "Linear.__init__.__globals__"),
    ("torch.nn.modules", "linear Linear"),
    ("collections", "OrderedDict.__reduce_ex__"),
    ("collections", "abc.sys.modules"),
    ("collections", "_sys"),
    ("collections", ""),
    ("builtins", "set.__class__.__base__.__subclasses__"),
    ("builtins", "getattr.__call__"),
    ("builtins.", "dict"),
    ("builtins", "unicode"),
    ("copy_reg", "_reconstructor.__globals__"),
    ("pathlib", "os.system"),
    ("pathlib._local", "io.open"),
    ("os.", "system"),
    ("os..", "system"),
    ("os.path", "os.system"),
    ("os.path.", ""),
    ("os.no_such_module", "f"),
    ("numpy.f2py\u200b", "run"),
    ("sys.", "modules"),
]

DISGUISES_OF_NOBODY = [
    ("", ""),
    ("", "system"),
    (".", "system"),
    (".os", "system"),
    ("OS", "system"),
    ("Torch._utils", "_rebuild_tensor_v2"),
    (" os", "system"),
    ("os ", "system"),
    ("os\0", "system"),
    ("os\n", "system"),
    ("\u043es", "system"),  # a Cyrillic o
    ("\uff4f\uff53", "system"),  # full-width letters, which only source code folds
    ("o\u00ads", "system"),
    ("collections OrderedDict", ""),
    ("\ud800", "\udfff"),
    ("x" * 1_000_000, "y" * 1_000_000),
    ("a." * 500_000, "." * 500_000),
]

STRANGERS = each(
    """
    __main__ Net
    __torch__ Model
    my_project.models.unet UNet
    models.yolo Model
    ultralytics.nn.tasks DetectionModel
    osx system
    torchy Linear
    """
)


@pytest.mark.parametrize(("module", "name"), SAVED_MODULE + HONEST + PYTHON_2)
def test_honest_globals_are_plain(module: str, name: str) -> None:
    is_instance = kind_of(*modern(module, name)) == "instance"
    assert trust(module, name) is (Trust.DANGEROUS if is_instance else Trust.PLAIN)


@pytest.mark.parametrize(("module", "name"), GADGETS)
def test_gadgets_are_dangerous_to_call(module: str, name: str) -> None:
    assert called(module, name, "x") is Trust.DANGEROUS
    assert called(module, name, "x", is_new=True) is Trust.DANGEROUS
    assert trust(module, name) is not Trust.UNKNOWN


@pytest.mark.parametrize("package", entries("stdlib.txt"))
def test_other_names_of_the_standard_library_are_dangerous_to_name(package: str) -> None:
    assert trust(package, "no_such_name") is Trust.DANGEROUS
    assert trust(f"{package}.below", "no_such_name") is Trust.DANGEROUS


@pytest.mark.parametrize(("module", "name"), DISGUISES_OF_KNOWN)
def test_no_spelling_makes_a_known_package_plain(module: str, name: str) -> None:
    assert trust(module, name) in NOT_PLAIN
    assert called(module, name, "x") is Trust.DANGEROUS


@pytest.mark.parametrize(("module", "name"), DISGUISES_OF_NOBODY, ids=lambda text: ascii(text)[:40])
def test_what_only_resembles_a_known_package_is_unknown(module: str, name: str) -> None:
    assert trust(module, name) is Trust.UNKNOWN


@pytest.mark.parametrize(("module", "name"), STRANGERS)
def test_modules_that_nobody_knows_are_unknown(module: str, name: str) -> None:
    assert trust(module, name) is Trust.UNKNOWN


@pytest.mark.parametrize(
    ("module", "name"),
    each(
        """
        builtins eval getattr type
        __builtin__ eval getattr type
        _codecs encode
        copyreg _reconstructor
        copy_reg _reconstructor
        torch.storage _load_from_bytes
        """
    ),
)
def test_functions_that_do_anything_are_never_kept(module: str, name: str) -> None:
    assert trust(module, name) is Trust.DANGEROUS


@pytest.mark.parametrize(
    ("module", "name"),
    each(
        """
        numpy bool_ float64 int64 matrix record void ndarray
        numpy.ma MaskedArray
        numpy.ma.core MaskedArray
        pytorch_lightning.callbacks.model_checkpoint ModelCheckpoint
        torch float32 FloatStorage relu
        torch.nn.functional relu
        torch.nn.init normal_
        """
    ),
)
def test_what_is_only_named_is_never_called(module: str, name: str) -> None:
    assert trust(module, name) is Trust.PLAIN
    for args in ((), ("x",), ({"__array_interface__": 1},)):
        assert called(module, name, *args) is Trust.DANGEROUS
        assert called(module, name, *args, is_new=True) is Trust.DANGEROUS


@pytest.mark.parametrize(
    ("module", "name"),
    each(
        """
        torch.distributed.device_mesh DeviceMesh
        transformers.training_args TrainingArguments
        accelerate.state PartialState
        accelerate.utils.dataclasses DeepSpeedPlugin
        """
    ),
)
def test_what_asks_the_environment_is_made_and_neither_called_nor_kept(module: str, name: str) -> None:
    assert called(module, name, is_new=True) is Trust.PLAIN
    assert called(module, name) is Trust.DANGEROUS
    assert trust(module, name) is Trust.DANGEROUS


@pytest.mark.parametrize(
    "argument",
    [b"cbuiltins\neval\n", b"](cbuiltins\neval\ne", b"}X\1\0\0\0acos\nsystem\ns", b"cbuiltins\ngetattr\n"],
)
def test_what_nobody_knows_is_handed_nothing_that_runs(argument: bytes) -> None:
    data = b"\x80\4cmy.module\nfunction\n" + argument + b"X\1\0\0\0x\x86R."
    assert has_errors(pickles_in(data).safety)


def partial_of(*state: Any) -> object:
    """Return what is pickled as a partial of a class, and is given another state."""

    class Changed:
        def __reduce__(self) -> tuple[Any, ...]:
            return functools.partial, (dict,), (*state, None)

    return Changed()


class Called:
    """What calls a function with a partial among its arguments."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced

    def __call__(self) -> None:
        """Look like a function, which is all that pickling one asks for."""


@pytest.mark.parametrize(
    "value",
    [
        partial_of(os.system, ("x",), {}),
        partial_of(getattr, ("os", "system"), {}),
        partial_of(dict, (eval,), {}),
        Called(Called(functools.partial, dict), "x"),
        Called(collections.OrderedDict, Called(functools.partial, dict)),
        Called(datetime.timedelta, collections.defaultdict(functools.partial(dict))),
        Called(collections.defaultdict, Called(functools.partial, eval)),
        Called(operator.getitem, collections.defaultdict(functools.partial(dict)), "missing"),
        collections.defaultdict(functools.partial(os.system, "x")),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_partial_is_no_way_to_call_what_is_not_on_the_list(value: object, protocol: int) -> None:
    assert has_errors(pickles_in(pickle.dumps(value, protocol)).safety)


def test_modules_are_made_and_not_called() -> None:
    linear = ("torch.nn.modules.linear", "Linear")
    assert called(*linear, is_new=True) is Trust.PLAIN
    assert called(*linear) is Trust.DANGEROUS
    assert called(*linear, 3, 4) is Trust.DANGEROUS
    assert called(*linear, 3, is_new=True) is Trust.DANGEROUS


def test_objects_of_unlisted_classes_of_packages_are_unknown_and_calls_are_not() -> None:
    forest = ("sklearn.ensemble._forest", "RandomForestClassifier")
    assert trust(*forest) is Trust.KNOWN
    assert called(*forest, is_new=True) is Trust.KNOWN
    assert (
        called("copyreg", "_reconstructor", Global(*forest), Global("builtins", "object"), None)
        is Trust.KNOWN
    )
    assert called(*forest) is Trust.DANGEROUS
    assert called("numpy", "memmap", "path", is_new=True) is Trust.DANGEROUS


EVAL = Global("builtins", "eval")
GETATTR = Call(Global("builtins", "getattr"), (Global("torch._C", "_VariableFunctionsClass"), "relu"))
TENSOR = Global("torch", "Tensor")
MODULE = Call(Global("torch.nn.modules.container", "ModuleList"), ())
MODULE.is_new = True
WITH_FUNCTION = Call(Global("argparse", "Namespace"), ())
WITH_FUNCTION.state = {"detach": Global("torch.nn.functional", "relu")}
REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
PARTIAL = Call(Global("functools", "partial"), (Global("torch.nn.modules.linear", "Linear"),))
DEFAULTS = Mapped(Global("collections", "defaultdict"))
DEFAULTS.factory = PARTIAL
TREE = Call(Global("sklearn.tree._tree", "Tree"), (1, "classes", 1))


@pytest.mark.parametrize(
    ("module", "name", "args"),
    [
        ("numpy.random._pickle", "__generator_ctor", ("x", EVAL)),
        ("numpy.random._pickle", "__generator_ctor", ("x", GETATTR)),
        ("numpy.random._pickle", "__bit_generator_ctor", (Global("pathlib", "Path"),)),
        ("torch._tensor", "_rebuild_from_type_v2", (EVAL, TENSOR, ("x",), {})),
        ("torch._tensor", "_rebuild_from_type_v2", (GETATTR, TENSOR, ("x",), {})),
        ("torch._tensor", "_rebuild_from_type_v2", (Global("builtins", "dict"), TENSOR, ("x",), {})),
        ("torch._tensor", "_rebuild_from_type_v2", (REBUILD, EVAL, (1,), {})),
        ("torch._tensor", "_rebuild_from_type_v2", (REBUILD, TENSOR, (EVAL,), {})),
        ("torch._tensor", "_rebuild_from_type_v2", (REBUILD, TENSOR, [1], {})),
        ("torch._utils", "_rebuild_wrapper_subclass", (EVAL, "float32")),
        ("torch._utils", "_rebuild_parameter", ([[EVAL]], True)),
        ("torch._utils", "_rebuild_parameter", ({"a": {"b": (EVAL,)}}, True)),
        ("jax._src.array", "_reconstruct_array", (EVAL, ("x",), (), {})),
        ("collections", "defaultdict", (EVAL,)),
        ("collections", "defaultdict", (GETATTR,)),
        ("collections", "defaultdict", (Global("torch.nn.modules.linear", "Linear"),)),
        ("builtins", "list", (Global("torch", "float32"),)),
        ("builtins", "getattr", (Global("pathlib", "PosixPath"), "write_text")),
        ("builtins", "getattr", (Global("numpy", "ndarray"), "tofile")),
        ("builtins", "getattr", (Global("torch._C", "_VariableFunctionsClass"), "from_file")),
        ("builtins", "getattr", (Global("my", "Class"), "__globals__")),
        ("builtins", "getattr", ([], "append")),
        ("builtins", "type", ("Name", (), {})),
        ("builtins", "eval", ("data", {"data": "x"})),
        ("builtins", "eval", ("data", {"data": Call(EVAL, ("x",)), "y": 1})),
        ("_codecs", "encode", ("text", "zlib")),
        ("copyreg", "_reconstructor", (EVAL, Global("builtins", "object"), None)),
        ("copyreg", "_reconstructor", (TENSOR, Global("os", "PathLike"), None)),
        ("copyreg", "_reconstructor", (Global("torch.hub", "load"), Global("builtins", "tuple"), ("x",))),
        ("array", "_array_reconstructor", (EVAL, "d", 1, b"")),
        ("numpy.core.multiarray", "_reconstruct", (EVAL, (0,), b"b")),
        ("numpy.core.multiarray", "_reconstruct", (Global("torch", "Tensor"), (0,), b"b")),
        (
            "numpy.core.multiarray",
            "scalar",
            (Call(Global("numpy", "dtype"), ("V8", False, True)), b"12345678"),
        ),
        ("torch._utils", "_rebuild_parameter", (MODULE, True)),
        ("torch._utils", "_rebuild_parameter", (WITH_FUNCTION, True)),
        ("torch._utils", "_rebuild_parameter_with_state", ("t", True, {}, {"__class__": "x"})),
        ("torch._tensor", "_rebuild_from_type_v2", (REBUILD, TENSOR, (1,), {"__dict__": {}})),
        ("builtins", "tuple", (MODULE,)),
        ("collections", "OrderedDict", (MODULE,)),
        ("collections", "OrderedDict", ([("a", Global("transformers.training_args", "TrainingArguments"))],)),
        ("functools", "partial", (Call(TENSOR, ()),)),
        ("functools", "partial", (Global("torch.nn.modules.linear", "Linear"), 4)),
        ("torch._utils", "_rebuild_parameter", (PARTIAL, True)),
        ("torch._utils", "_rebuild_parameter", (DEFAULTS, True)),
        ("argparse", "Namespace", (DEFAULTS,)),
        ("collections", "defaultdict", (PARTIAL, {})),
        ("builtins", "tuple", (PARTIAL,)),
        ("sklearn.neighbors._kd_tree", "newObj", (EVAL,)),
        ("sklearn.neighbors._kd_tree", "newObj", (Global("sklearn.neighbors._base", "KNeighborsMixin"),)),
        ("sklearn.tree._tree", "Tree", (1, PARTIAL, 1)),
        ("torch._utils", "_rebuild_parameter", (TREE, True)),
        ("builtins", "list", (TREE,)),
        ("torchao.quantization.quant_primitives", "MappingType", (EVAL,)),
        ("torch.storage", "_load_from_bytes", ("text",)),
    ],
)
def test_no_name_reaches_a_call_that_has_no_place_for_it(module: str, name: str, args: tuple) -> None:
    assert called(module, name, *args) is Trust.DANGEROUS


@pytest.mark.parametrize(
    ("module", "name", "args"),
    [
        (
            "numpy.random._pickle",
            "__generator_ctor",
            ("PCG64", Global("numpy.random._pickle", "__bit_generator_ctor")),
        ),
        ("numpy.random._pickle", "__bit_generator_ctor", (Global("numpy.random._pcg64", "PCG64"),)),
        ("torch._tensor", "_rebuild_from_type_v2", (REBUILD, TENSOR, (1, (2,), (1,)), {"a": GETATTR})),
        ("collections", "defaultdict", (Global("builtins", "list"),)),
        ("collections", "OrderedDict", ([("a", Global("torch", "float32")), ("b", GETATTR)],)),
        ("numpy.core.multiarray", "_reconstruct", (Global("numpy", "ndarray"), (0,), b"b")),
        ("torch._utils", "_rebuild_parameter_with_state", ("t", True, {}, {"act": Global("torch", "relu")})),
        ("builtins", "set", ([MODULE],)),
        ("builtins", "getattr", (Global("torch._C", "_VariableFunctionsClass"), "relu")),
        ("builtins", "type", (None,)),
        ("_codecs", "encode", ("text", "latin1")),
        ("torchao.quantization.quant_primitives", "MappingType", (1,)),
        ("torchao.quantization.quantize_.common.kernel_preference", "KernelPreference", ("auto",)),
    ],
)
def test_honest_calls_are_plain(module: str, name: str, args: tuple) -> None:
    assert called(module, name, *args) is Trust.PLAIN


@pytest.mark.parametrize(
    ("module", "name", "args"),
    [
        ("builtins", "getattr", (MODULE, "_infer_parameters")),
        ("builtins", "getattr", (Global("torch.optim.lr_scheduler", "CyclicLR"), "_triangular_scale_fn")),
        ("functools", "partial", (Global("torch.nn.modules.linear", "Linear"),)),
        ("functools", "partial", (MODULE,)),
        ("functools", "partial", (GETATTR,)),
        ("functools", "partial", (PARTIAL,)),
        ("collections", "defaultdict", (PARTIAL,)),
        ("sklearn.tree._tree", "Tree", (1, "classes", 1)),
        ("sklearn.neighbors._kd_tree", "newObj", (Global("sklearn.neighbors._kd_tree", "KDTree"),)),
        ("sklearn._loss._loss", "CyHalfBinomialLoss", ()),
        ("sklearn.linear_model._sgd_fast", "Hinge", (1.0,)),
        ("gym.utils.seeding", "RandomNumberGenerator._generator_ctor", ("PCG64",)),
        ("numpy.core.multiarray", "_reconstruct", (Global("my.arrays", "Array"), (0,), b"b")),
    ],
)
def test_calls_of_which_nobody_knows_what_comes_of_them_are_unknown(
    module: str, name: str, args: tuple
) -> None:
    assert called(module, name, *args) is Trust.UNKNOWN


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("my", "os.system"),
        ("my.module", "Class.__init__"),
        ("my.module", "__builtins__"),
        ("my.__main__", "Class"),
        ("my.__init__", "Class"),
        ("__main__", "Class.method"),
        ("__mp_main__", "sys.modules"),
        ("my", "a.subprocess.b"),
    ],
)
def test_names_that_reach_behind_an_unknown_module_are_dangerous(module: str, name: str) -> None:
    assert trust(module, name) is Trust.DANGEROUS


def test_known_packages_are_never_plain_or_unknown() -> None:
    assert {trust(package, "no_such_name") for package in KNOWN} <= NOT_PLAIN
    assert {trust(f"{package}.sub.module", "no_such_name") for package in KNOWN} <= NOT_PLAIN


def test_every_entry_of_the_list_means_what_it_says() -> None:
    assert {trust(*pair) for pair in PLAIN} == {Trust.PLAIN}
    assert {trust(*pair) for pair in SHAPED} == {Trust.DANGEROUS}
    assert {trust(*pair) for pair in UNVETTED_NAMES} == {Trust.KNOWN}


@pytest.mark.parametrize("file", ["packages.txt", "allowed.txt", "stdlib.txt"])
def test_lists_are_ascii_and_hold_nothing_twice(file: str) -> None:
    lines = entries(file)
    assert all(line.isascii() and line == line.strip() for line in lines)
    assert sorted(set(lines)) == sorted(lines)


def test_no_name_stands_in_the_list_twice() -> None:
    pairs = [(module, name) for _, module, name in EXACT]
    assert [pair for pair in pairs if pairs.count(pair) > 1] == []
    # What a dotted name reaches, `getattr` may find: a class in a class, which is data.
    dotted = [pair for pair in pairs if "." in pair[1] and pair not in UNVETTED_NAMES]
    assert [name for _, name in dotted] == ["ShardedTensor.ProcessGroupState"]


@pytest.mark.parametrize(
    "name", ["os", "sys", "partial.func", "__builtins__", "__loader__", "a b", "", "\u043es"]
)
def test_a_family_has_no_place_for_what_is_no_plain_name(name: str) -> None:
    for _, module in FAMILIES:
        assert trust(module.removesuffix(".*"), name) in NOT_PLAIN


def test_top_level_names_have_no_dots() -> None:
    assert not [name for name in KNOWN if not name.isidentifier()]


modules_of_known = st.builds(
    lambda root, rest: f"{root}{rest}",
    st.sampled_from(KNOWN),
    st.just("") | st.text().map(lambda text: f".{text}"),
)


@given(modules_of_known, st.text())
def test_known_packages_are_never_unknown(module: str, name: str) -> None:
    assert trust(module, name) is not Trust.UNKNOWN


@given(st.text(), st.text())
def test_any_text_has_a_meaning(module: str, name: str) -> None:
    assert isinstance(trust(module, name), Trust)


@given(st.sampled_from(PLAIN), st.text(min_size=1), st.booleans())
def test_a_plain_module_with_anything_added_is_another(
    pair: tuple[str, str], extra: str, in_front: bool
) -> None:
    module, name = pair
    changed = extra + module if in_front else module + extra
    is_listed = (changed, name) in PLAIN or any(_has(family, changed) for _, family in FAMILIES)
    assert (trust(changed, name) is Trust.PLAIN) <= is_listed


def _has(family: str, module: str) -> bool:
    above = family.removesuffix(".*")
    return module == above or (family != above and module.startswith(f"{above}."))


@given(st.sampled_from([*PLAIN, *SHAPED]), st.text())
def test_dotted_names_are_never_plain(pair: tuple[str, str], attribute: str) -> None:
    module, name = pair
    assert trust(module, f"{name}.{attribute}") is not Trust.PLAIN


SHARDED = b"ctorch.distributed._shard.sharded_tensor.api\nShardedTensor\n"


def spelled(owner: bytes, name: bytes, arguments: bytes = b")") -> bytes:
    """Return a pickle of an object of the class that ``getattr`` finds, as protocol 2 writes it."""
    return (
        b"\x80\x02c__builtin__\ngetattr\n"
        + owner
        + b"X"
        + bytes([len(name), 0, 0, 0])
        + name
        + b"\x86R"
        + arguments
        + b"\x81."
    )


def test_a_class_in_a_class_is_found_by_getattr_where_its_dotted_name_is_listed() -> None:
    found = pickles_in(spelled(SHARDED, b"ProcessGroupState"))
    assert found.safety == ()
    made = found.pickles[0].root
    assert isinstance(made, Call)
    assert made.function == Global(
        "torch.distributed._shard.sharded_tensor.api", "ShardedTensor.ProcessGroupState"
    )


@pytest.mark.parametrize(
    "data",
    [
        spelled(SHARDED, b"init_from_local_shards"),
        spelled(SHARDED, b"__init__"),
        spelled(b"cos\nsystem\n", b"ProcessGroupState"),
        spelled(SHARDED, b"ProcessGroupState", b"cos\nsystem\n\x85"),
        spelled(spelled(SHARDED, b"ProcessGroupState")[2:-2], b"mro"),
        b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93" + SHARDED + b"\x8c\x13ProcessGroupState.x\x86R.",
    ],
)
def test_getattr_finds_nothing_else(data: bytes) -> None:
    assert has_errors(pickles_in(data).safety)
