"""What the globals of pickles mean: the gadgets of published attacks, disguises, and names nobody knows."""

from __future__ import annotations

import collections
import functools
import operator
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.containers.pickle import pickle_nodes as under_test
from ckpttool.containers.pickle.constructors import constructors, evaluate
from ckpttool.containers.pickle.pickle_nodes import Call, Global, Trust, trust, value_kind
from ckpttool.core.report import has_errors
from tests.security import assembler
from tests.support.containers import pickles_in

NAMES = Path(under_test.__file__).with_name("lists")
NOT_PLAIN = {Trust.DANGEROUS, Trust.KNOWN}


def entries(file: str) -> list[str]:
    lines = (NAMES / file).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def names_of(file: str, skipped: int) -> list[tuple[str, str]]:
    """Return the names in a list, behind so many words that describe them."""
    rows = (line.partition(":")[0].split()[skipped:] for line in entries(file))
    return [(module, name) for module, *names in rows for name in names]


VALUES, OBJECTS = names_of("values.txt", 1), names_of("objects.txt", 0)
KNOWN = entries("stdlib.txt") + entries("packages.txt")


def called(module: str, name: str, *args: object, is_new: bool = False) -> Trust:
    call = Call(Global(module, name), args)
    call.is_new = is_new
    return evaluate(call)


def each(text: str) -> list[tuple[str, str]]:
    """Return the pairs that lines of a module and some names in it make."""
    rows = [line.split() for line in text.strip().splitlines()]
    return [(module, name) for module, *names in rows for name in names]


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


@pytest.mark.parametrize("how", [False, True])
def test_gadgets_are_dangerous_to_call(how: bool) -> None:
    harmless = [pair for pair in GADGETS if called(*pair, "x", is_new=how) is not Trust.DANGEROUS]
    assert harmless == [pair for pair in GADGETS if pair[1] == "partial" and pair[0] == "functools"]
    assert [pair for pair in GADGETS if trust(*pair) is Trust.UNKNOWN] == []


def test_other_names_of_the_standard_library_are_dangerous_to_name() -> None:
    packages = entries("stdlib.txt")
    names = [name for package in packages for name in (package, f"{package}.below")]
    assert {trust(name, "no_such_name") for name in names} == {Trust.DANGEROUS}


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
        Called(collections.defaultdict, Called(functools.partial, eval)),
        Called(operator.getitem, collections.defaultdict(functools.partial(dict)), "missing"),
        collections.defaultdict(functools.partial(os.system, "x")),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_partial_is_no_way_to_call_what_is_not_on_the_list(value: object, protocol: int) -> None:
    assert has_errors(pickles_in(pickle.dumps(value, protocol)).safety)


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


def test_a_name_is_on_one_list() -> None:
    assert {trust(*pair) for pair in VALUES} == {Trust.PLAIN}
    assert {trust(*pair) for pair in OBJECTS if pair[0] != "builtins"} == {Trust.KNOWN}
    for names in (VALUES, OBJECTS):
        assert len(set(names)) == len(names)
    assert not {pair for pair in OBJECTS if value_kind(*pair) and pair[0] != "builtins"}
    assert not constructors().keys() & set(OBJECTS)


@pytest.mark.parametrize(
    "file", ["packages.txt", "stdlib.txt", "constructors.txt", "values.txt", "objects.txt"]
)
def test_lists_are_ascii_and_hold_nothing_twice(file: str) -> None:
    lines = entries(file)
    assert all(line.isascii() and line == line.strip() for line in lines)
    assert len(set(lines)) == len(lines)


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


@given(st.sampled_from(VALUES), st.text(min_size=1), st.booleans())
def test_a_plain_module_with_anything_added_is_another(
    pair: tuple[str, str], extra: str, in_front: bool
) -> None:
    module, name = pair
    changed = extra + module if in_front else module + extra
    assert (trust(changed, name) is Trust.PLAIN) <= ((changed, name) in VALUES)


@given(st.sampled_from([*VALUES, *constructors()]), st.text())
def test_dotted_names_are_never_plain(pair: tuple[str, str], attribute: str) -> None:
    module, name = pair
    dotted = f"{name}.{attribute}"
    assert trust(module, dotted) is not Trust.PLAIN and (module, dotted) not in constructors()


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
    assert not has_errors(found.safety)
    made = found.pickles[0].root
    assert isinstance(made, Call)
    assert made.function == Global(
        "torch.distributed._shard.sharded_tensor.api", "ShardedTensor.ProcessGroupState"
    )


@pytest.mark.parametrize(
    "data",
    [
        spelled(SHARDED, b"__init__"),
        spelled(b"cos\nsystem\n", b"ProcessGroupState"),
        spelled(SHARDED, b"ProcessGroupState", b"cos\nsystem\n\x85"),
        spelled(spelled(SHARDED, b"ProcessGroupState")[2:-2], b"mro"),
        b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93" + SHARDED + b"\x8c\x13ProcessGroupState.x\x86R.",
    ],
)
def test_getattr_finds_nothing_else(data: bytes) -> None:
    assert has_errors(pickles_in(data).safety)


def member(enum: bytes, name: bytes) -> bytes:
    """Return a pickle of an enum's member, as Python 3.11.0 to 3.11.3 write it by protocol 2."""
    return b"\x80\x02c__builtin__\ngetattr\n" + enum + b"X" + bytes([len(name), 0, 0, 0]) + name + b"\x86R."


ENCODING = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"


@pytest.mark.parametrize(
    ("enum", "name"),
    [
        (ENCODING, b"TORCH_CONTIGUOUS_FORMAT"),
        (b"ctransformers.training_args\nOptimizerNames\n", b"ADAMW_TORCH"),
        (b"caccelerate.utils.dataclasses\nDistributedType\n", b"NO"),
    ],
)
def test_a_member_of_a_listed_enum_is_plain_by_name(enum: bytes, name: bytes) -> None:
    found = pickles_in(member(enum, name))
    assert found.safety == () and not found.pickles[0].unknown


@pytest.mark.parametrize(
    "data",
    [
        *(
            member(ENCODING, name)
            for name in (b"__class__", b"__init_subclass__", b"mro", b"_missing_", b"A.B")
        ),
        member(ENCODING[:-2] + b"X\n", b"TORCH_CONTIGUOUS_FORMAT"),
        member(b"ccollections\nOrderedDict\n", b"A"),
        member(member(ENCODING, b"A")[2:-1], b"B"),
        member(ENCODING, b"A")[:-1] + b")R.",
        member(ENCODING, b"A")[:-1] + b")\x81.",
        member(ENCODING, b"A")[:-1] + b"}X\1\0\0\0ac__builtin__\ngetattr\nsb.",
    ],
)
def test_nothing_else_of_an_enum_is_plain(data: bytes) -> None:
    assert pickles_in(data).safety != ()


@pytest.mark.parametrize(
    ("owner", "name", "is_dangerous_stored"),
    [
        ("my.code Class", "method", False),
        ("my.code Class", "__globals__", True),
        ("numpy ndarray", "tofile", False),
        ("torch._C _VariableFunctionsClass", "from_file", False),
        ("pathlib PosixPath", "write_text", True),
    ],
)
def test_getattr_is_judged_by_the_name_that_it_finds(
    owner: str, name: str, is_dangerous_stored: bool
) -> None:
    attribute = assembler.call("builtins", "getattr", assembler.Name(*owner.split()), name)
    stored = pickles_in(assembler.pickled(attribute, 2)).safety
    assert stored != () and has_errors(stored) is is_dangerous_stored
    called = pickles_in(assembler.pickled(assembler.Call(attribute, ("x",)), 2)).safety
    assert has_errors(called) is (is_dangerous_stored or not owner.startswith("my."))
