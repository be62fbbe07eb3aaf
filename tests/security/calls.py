"""What a pickle may call to reach the file system: one generator a class of attack, each an expression.

A payload creates one file below the directory that it is given, and does nothing else.
"""

from __future__ import annotations

import io
import marshal
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.security.assembler import Build, Call, Code, Discarded, Name, call, method, pickled

Variants = Iterator[tuple[str, Any]]
"""Names of variants, and the expressions."""

USER_MODULE = "hostile_module"
"""A module that nobody knows; the loaders' process can import it."""
USER_SOURCE = "import os\n\n\nclass Config:\n    def __init__(self, *args):\n        self.args = args\n"
USER_SOURCE += "\n\ndef make(path):\n    open(path, 'w').close()\n"
USER_SOURCE += "\n\nclass Stateful:\n    def __setstate__(self, path):\n        make(path)\n"


@dataclass
class Place:
    """Where a payload shall create its file; `files` are what it needs beside it, by name."""

    marker: str
    directory: str
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def command(self) -> str:
        return f"touch {shlex.quote(self.marker)}"

    @property
    def expression(self) -> str:
        return f"open({self.marker!r}, 'w').close()"

    @property
    def code(self) -> Call:
        """Return the call that compiles the expression."""
        return call("builtins", "compile", self.expression, "x", "exec")

    def beside(self, name: str, data: bytes) -> str:
        """Return the path of one more file."""
        self.files[name] = data
        return f"{self.directory}/{name}"

    def evil(self, protocol: int = 2) -> bytes:
        """Return a pickle that creates the file, to be hidden in something else."""
        return pickled(call("os", "mknod", self.marker), protocol)


ATTACKS: dict[str, Callable[[Place], Variants]] = {}


def attack(generator: Callable[[Place], Variants]) -> Callable[[Place], Variants]:
    """Add a class of attack."""
    ATTACKS[generator.__name__] = generator
    return generator


EVAL, EXEC = Name("builtins", "eval"), Name("builtins", "exec")


@attack
def plain_calls(place: Place) -> Variants:
    """Functions that everybody warns of, by their own names."""
    yield "os.system", call("os", "system", place.command)
    yield "os.popen", method(call("os", "popen", place.command), "read")
    yield "os.mknod", call("os", "mknod", place.marker)
    yield "os.open", call("os", "open", place.marker, 0o101)
    yield "os.mkfifo", call("os", "mkfifo", place.marker)
    yield "os.symlink", call("os", "symlink", "/dev/null", place.marker)
    yield "os.spawnlp", call("os", "spawnlp", 0, "touch", "touch", place.marker)
    yield "eval", Call(EVAL, (place.expression,))
    yield "exec", Call(EXEC, (place.expression,))
    yield "exec_compiled", Call(EXEC, (place.code,))
    yield "open", call("builtins", "open", place.marker, "w")
    yield "getoutput", call("subprocess", "getoutput", place.command)
    for name in ("call", "check_call", "check_output", "run"):
        yield f"subprocess.{name}", call("subprocess", name, ["touch", place.marker])
    yield "subprocess.Popen", method(call("subprocess", "Popen", ["touch", place.marker]), "wait")


@attack
def aliases(place: Place) -> Variants:
    """The same under other names."""
    yield "posix.system", call("posix", "system", place.command)
    yield "posix.mknod", call("posix", "mknod", place.marker)
    yield "_io.open", call("_io", "open", place.marker, "w")
    yield "io.open", call("io", "open", place.marker, "w")
    yield "io.FileIO", call("io", "FileIO", place.marker, "w")
    yield "_io.FileIO", call("_io", "FileIO", place.marker, "w")
    yield "_pyio.open", call("_pyio", "open", place.marker, "w")
    yield "codecs.open", call("codecs", "open", place.marker, "w")
    yield "path.touch", method(call("pathlib", "PosixPath", place.marker), "touch")
    yield "shutil.copyfile", call("shutil", "copyfile", "/dev/null", place.marker)
    yield (
        "shutil.copytree",
        call("shutil", "copytree", place.beside("tree/x", b"").removesuffix("/x"), place.marker),
    )
    yield "__import__", method(call("builtins", "__import__", "os"), "system", place.command)
    yield "import_module", method(call("importlib", "import_module", "os"), "mknod", place.marker)
    yield "gcd_import", method(call("importlib._bootstrap", "_gcd_import", "os"), "mknod", place.marker)
    script = place.beside("script.py", place.expression.encode())
    yield "runpy.run_path", call("runpy", "run_path", script)
    yield "runpy._run_code", call("runpy", "_run_code", place.code, {})
    yield "pty.spawn", call("pty", "spawn", ["touch", place.marker])
    yield "imp.load_source", call("imp", "load_source", "hostile_script", script)
    loader = call("importlib.machinery", "SourceFileLoader", "hostile_script", script)
    yield "loader.load_module", method(loader, "load_module")
    yield "nt.system", call("nt", "system", place.command)


@attack
def python2_names(place: Place) -> Variants:
    """Names of Python 2, which protocols up to 2 rename."""
    yield "__builtin__.eval", call("__builtin__", "eval", place.expression)
    yield "__builtin__.open", call("__builtin__", "open", place.marker, "w")
    yield "commands.getoutput", call("commands", "getoutput", place.command)
    yield "itertools.imap", call("__builtin__", "list", call("itertools", "imap", EVAL, [place.expression]))
    yield "dbhash", call("anydbm", "open", place.marker, "c")
    yield (
        "copy_reg",
        call(
            "copy_reg",
            "_reconstructor",
            Name("logging", "FileHandler"),
            Name("logging", "FileHandler"),
            place.marker,
        ),
    )


@attack
def library_writers(place: Place) -> Variants:
    """What the standard library opens for writing."""
    yield "logging.FileHandler", call("logging", "FileHandler", place.marker)
    yield "logging.handlers", call("logging.handlers", "WatchedFileHandler", place.marker)
    yield "tempfile.mkstemp", call("tempfile", "mkstemp", "a", "b", place.marker.rpartition("/")[0])
    yield "tempfile.mkdtemp", call("tempfile", "mkdtemp", "a", "b", place.marker.rpartition("/")[0])
    yield "zipfile", method(call("zipfile", "ZipFile", place.marker, "w"), "close")
    yield "tarfile.open", call("tarfile", "open", place.marker, "w")
    yield "sqlite3.connect", method(call("sqlite3", "connect", place.marker), "execute", "create table a(b)")
    yield "shelve.open", call("shelve", "open", place.marker)
    yield "dbm.open", call("dbm", "open", place.marker, "c")
    yield "dbm.dumb.open", method(call("dbm.dumb", "open", place.marker, "c"), "close")
    yield "gzip.open", call("gzip", "open", place.marker, "wb")
    yield "bz2.open", call("bz2", "open", place.marker, "wb")
    yield "lzma.open", call("lzma", "open", place.marker, "wb")
    yield "wave.open", call("wave", "open", place.marker, "wb")
    yield "mailbox", call("mailbox", "mbox", place.marker)
    yield "http.cookies", method(call("http.cookiejar", "LWPCookieJar", place.marker), "save")
    yield "venv.create", call("venv", "create", place.marker)
    yield "compileall", call("py_compile", "compile", place.beside("ok.py", b"1\n"), place.marker)
    yield "imaplib", call("imaplib", "IMAP4_stream", place.command)
    yield "uuid", call("uuid", "_get_command_stdout", "touch", place.marker)
    yield "pydoc.pipepager", call("pydoc", "pipepager", "text", place.command)
    yield "distutils.write_file", call("distutils.file_util", "write_file", place.marker, [])
    yield "distutils.spawn", call("distutils.spawn", "spawn", ["touch", place.marker])
    yield "socket", method(call("socket", "socket", 1, 1), "bind", place.marker)


@attack
def library_evaluators(place: Place) -> Variants:
    """What the standard library evaluates as text."""
    text = place.expression
    yield "cProfile.run", call("cProfile", "run", text, place.marker)
    yield "cProfile.runctx", call("cProfile", "runctx", text, {}, {}, place.marker)
    yield "profile.run", call("profile", "run", text, place.marker)
    yield "timeit.timeit", call("timeit", "timeit", text, "pass", Name("time", "perf_counter"), 1)
    yield "timeit.repeat", call("timeit", "repeat", text, "pass", Name("time", "perf_counter"), 1, 1)
    yield "timeit.main", call("timeit", "main", ["-n", "1", "-r", "1", text])
    yield "trace", method(call("trace", "Trace", False, False), "run", text)
    yield "bdb", method(call("bdb", "Bdb"), "run", text)
    yield "code.runsource", method(call("code", "InteractiveInterpreter"), "runsource", text)
    yield "code.runcode", method(call("code", "InteractiveInterpreter"), "runcode", place.code)
    yield "doctest", call("doctest", "run_docstring_examples", f">>> {text}\n", {})
    yield "typing.ForwardRef", call("typing", "_eval_type", call("typing", "ForwardRef", text), {}, {})
    yield "idlelib.calltip", call("idlelib.calltip", "get_entity", text)
    yield "pickle.loads", call("pickle", "loads", place.evil())
    yield "_pickle.loads", call("_pickle", "loads", place.evil())
    yield "pickle._loads", call("pickle", "_loads", place.evil())
    compiled = call("marshal", "loads", _marshalled(place))
    yield (
        "marshal.called",
        Call(call("types", "FunctionType", compiled, {"__builtins__": Name("builtins", "__dict__")})),
    )
    yield "lib2to3", method(call("lib2to3.pgen2.grammar", "Grammar"), "loads", place.evil())
    place.beside("x.pth", f"import os; {text}\n".encode())
    yield "site.addsitedir", call("site", "addsitedir", place.directory)
    yield (
        "ctypes",
        Call(call("builtins", "getattr", call("ctypes", "CDLL", None), "system"), (place.command.encode(),)),
    )
    yield "pydoc.locate", Call(call("pydoc", "locate", "os.mknod"), (place.marker,))
    yield "pkgutil.resolve_name", Call(call("pkgutil", "resolve_name", "os:mknod"), (place.marker,))


def _marshalled(place: Place) -> bytes:
    """Return the code of the expression, as this Python marshals it."""
    return marshal.dumps(compile(place.expression, "x", "exec"))


@attack
def higher_order(place: Place) -> Variants:
    """Harmless names that call what they are given."""
    text = [place.expression]
    partial = call("functools", "partial", EVAL, place.expression)
    mapped = call("builtins", "map", EVAL, text)
    yield "partial", Call(partial)
    yield "functools.reduce", call("functools", "reduce", EVAL, [place.expression, {}])
    yield "map.list", call("builtins", "list", mapped)
    yield "map.set", call("builtins", "set", mapped)
    yield "map.frozenset", call("builtins", "frozenset", mapped)
    yield "map.bytes", call("builtins", "bytes", mapped)
    yield "map.deque", call("collections", "deque", mapped)
    yield "map.OrderedDict", call("collections", "OrderedDict", mapped)
    yield "map.fromkeys", method(Name("collections", "OrderedDict"), "fromkeys", mapped)
    yield (
        "map.newobj",
        Call(
            Name("builtins", "tuple"),
            (Call(Name("builtins", "map"), (EVAL, text), how="newobj"),),
            how="newobj",
        ),
    )
    yield "map.str_join", method("", "join", mapped)
    yield "filter", call("builtins", "tuple", call("builtins", "filter", EVAL, text))
    yield "filter.deque", call("collections", "deque", call("builtins", "filter", EVAL, text))
    yield "starmap", call("builtins", "list", call("itertools", "starmap", EVAL, [(place.expression,)]))
    yield (
        "accumulate",
        call("builtins", "list", call("itertools", "accumulate", [place.expression, {}], EVAL)),
    )
    yield "groupby", call("builtins", "list", call("itertools", "groupby", text, EVAL))
    yield "nsmallest", call("heapq", "nsmallest", 2, [place.expression] * 2, EVAL)
    yield "iter", call("builtins", "next", call("builtins", "iter", partial, 0))
    yield "defaultdict.getitem", call("operator", "getitem", call("collections", "defaultdict", partial), "x")
    yield "defaultdict.missing", method(call("collections", "defaultdict", partial), "__missing__", "x")
    yield "operator.call", call("operator", "call", EVAL, place.expression)
    yield "methodcaller", Call(call("operator", "methodcaller", "mknod", place.marker), (_os(),))
    yield "attrgetter", Call(Call(call("operator", "attrgetter", "mknod"), (_os(),)), (place.marker,))
    yield "MethodType", Call(call("types", "MethodType", EVAL, place.expression))
    yield "weakref.finalize", call("weakref", "finalize", call("builtins", "set"), EVAL, place.expression)
    yield "atexit", call("atexit", "register", EVAL, place.expression)
    yield "Timer", method(call("threading", "Timer", 0, EVAL, text), "start")
    yield "Thread", method(call("threading", "Thread", None, EVAL, None, text), "start")
    yield (
        "ThreadPool",
        method(call("concurrent.futures", "ThreadPoolExecutor"), "submit", EVAL, place.expression),
    )
    yield "copyreg.__newobj__", call("copyreg", "__newobj__", Name("builtins", "tuple"), mapped)
    handler = Name("logging", "FileHandler")
    yield "copyreg._reconstructor", call("copyreg", "_reconstructor", handler, handler, place.marker)
    yield (
        "copyreg.__newobj_ex__",
        call("copyreg", "__newobj_ex__", Name("builtins", "frozenset"), (mapped,), {}),
    )
    yield "sched", _scheduled(place)
    yield (
        "newobj_ex.called",
        Call(Call(Name("functools", "partial"), (EVAL, place.expression), {}, "newobj_ex")),
    )


def _os() -> Call:
    return call("importlib", "import_module", "os")


def _scheduled(place: Place) -> Call:
    """Return a call of sched.scheduler.run, after an entry was made; the scheduler is memoized."""
    scheduler = pickled(call("sched", "scheduler"), 2)[2:-1] + b"q\x7b"
    again = Code(b"h\x7b")
    enter = Call(call("builtins", "getattr", Code(scheduler), "enter"), (0, 0, EVAL, (place.expression,)))
    return Discarded(enter, method(again, "run"))  # type: ignore[return-value]


@attack
def numpy_gadgets(place: Place) -> Variants:
    """What NumPy evaluates, calls and writes."""
    text = place.expression
    yield "crackfortran.myeval", call("numpy.f2py.crackfortran", "myeval", text, {}, {})
    yield "crackfortran.getlincoef", call("numpy.f2py.crackfortran", "getlincoef", text, [])
    yield "testing.runstring", call("numpy.testing", "runstring", text, {})
    yield "testing.private", call("numpy.testing._private.utils", "runstring", text, {})
    yield "testing.measure", call("numpy.testing", "measure", text)
    yield (
        "testing.assert_raises",
        call("numpy.testing", "assert_raises", Name("builtins", "ValueError"), EVAL, text),
    )
    yield (
        "testing.rundocs",
        call("numpy.testing", "rundocs", place.beside("docs.py", place.expression.encode())),
    )
    yield "exec_mod", call("numpy.distutils.exec_command", "exec_command", place.command)
    yield "memmap", call("numpy", "memmap", place.marker, "uint8", "w+", 0, (1,))
    yield "save", call("numpy", "save", place.marker, [1])
    yield "savez", call("numpy", "savez", place.marker, [1])
    yield "savetxt", call("numpy", "savetxt", place.marker, [1])
    yield "open_memmap", call("numpy.lib.format", "open_memmap", place.marker, "w+", "u1", (1,))
    yield "vectorize", Call(call("numpy", "vectorize", EVAL), (text,))
    yield "frompyfunc", Call(call("numpy", "frompyfunc", EVAL, 1, 1), (text,))
    yield "fromfunction", call("numpy", "fromfunction", call("functools", "partial", EVAL, text, {}), ())
    yield "random.generator", call("numpy.random._pickle", "__generator_ctor", text, EVAL)
    yield "random.randomstate", call("numpy.random._pickle", "__randomstate_ctor", text, EVAL)
    array = call("numpy", "array", [1])
    yield "tofile", method(array, "tofile", place.marker)
    yield "dump", method(array, "dump", place.marker)
    yield "load", call("numpy", "load", place.beside("inner.npy", place.evil()), None, True)
    yield (
        "genfromtxt",
        call("numpy", "genfromtxt", [text], Name("builtins", "str"), "#", "\t", 0, 0, {0: EVAL}),
    )
    yield "fromregex", call("numpy", "load", place.beside("other.npy", place.evil(4)), None, True)


@attack
def torch_gadgets(place: Place) -> Variants:
    """What PyTorch evaluates, calls, loads and writes."""
    text = place.expression
    inner = place.beside("inner.bin", _legacy(place))
    yield (
        "load.full",
        Call(
            Call(
                Name("functools", "partial"),
                (Name("torch", "load"), inner),
                {"weights_only": False},
                "newobj_ex",
            )
        ),
    )
    yield "save", call("torch", "save", [1], place.marker)
    place.beside("hubconf.py", f"{text}\ndef entry():\n    return 1\n".encode())
    hub = Call(
        Name("functools", "partial"),
        (Name("torch.hub", "load"), place.directory, "entry"),
        {"source": "local", "trust_repo": True},
        "newobj_ex",
    )
    yield "hub.load", Call(hub)
    yield "hub.import_module", call("torch.hub", "_load_local", place.directory, "entry")
    yield (
        "rebuild_from_type",
        call("torch._tensor", "_rebuild_from_type_v2", EVAL, Name("torch", "Tensor"), (text,), {}),
    )
    yield (
        "rebuild_from_type.type",
        call("torch._tensor", "_rebuild_from_type", EVAL, Name("torch", "Tensor"), (text,), {}),
    )
    yield "fx.reduce_graph_module", call("torch.fx.graph_module", "reduce_graph_module", {"_code": text}, "")
    yield "fx.exec_with_source", call("torch.fx.graph_module", "_exec_with_source", text, {})
    yield "fx.forward_from_src", call("torch.fx.graph_module", "_forward_from_src", text, {})
    yield "jit.exec_wrapper", call("torch.jit.unsupported_tensor_ops", "execWrapper", text, {}, {})
    yield "collect_env.run", call("torch.utils.collect_env", "run", place.command)
    yield "checkpoint", call("torch.utils.checkpoint", "checkpoint", EVAL, text)
    yield (
        "checkpoint.called",
        Call(
            Call(
                Name("functools", "partial"),
                (Name("torch.utils.checkpoint", "checkpoint"), EVAL, text),
                {"use_reentrant": False},
                "newobj_ex",
            )
        ),
    )
    yield "file_baton", method(call("torch.utils.file_baton", "FileBaton", place.marker), "try_acquire")
    yield (
        "datapipes",
        call("torch.utils.data.datapipes.utils.decoder", "basichandlers", "pickle", place.evil()),
    )
    yield "config_module", call("torch.utils._config_module", "pickle.loads", place.evil())
    yield "from_file", call("torch", "from_file", place.marker, True, 1)
    yield "storage.from_file", method(Name("torch", "UntypedStorage"), "from_file", place.marker, True, 1)
    yield (
        "PyTorchFileWriter",
        method(call("torch._C", "PyTorchFileWriter", place.marker), "write_end_of_file"),
    )
    yield "package", method(call("torch.package", "PackageExporter", place.marker), "close")
    yield "load_from_bytes.legacy", call("torch.storage", "_load_from_bytes", _legacy(place))
    yield "load_from_bytes.zip", call("torch.storage", "_load_from_bytes", _zip(place))
    yield (
        "getattr.from_file",
        call(
            "torch._tensor",
            "_rebuild_from_type_v2",
            call("builtins", "getattr", Name("torch._C", "_VariableFunctions"), "from_file"),
            Name("torch", "Tensor"),
            (place.marker, True, 1),
            {},
        ),
    )
    yield (
        "rebuild.write_text",
        call(
            "torch._tensor",
            "_rebuild_from_type_v2",
            call("builtins", "getattr", Name("pathlib", "PosixPath"), "write_text"),
            Name("torch", "Tensor"),
            (call("pathlib", "PosixPath", place.marker), "x"),
            {},
        ),
    )
    yield (
        "rebuild.tofile",
        call(
            "torch._tensor",
            "_rebuild_from_type_v2",
            call("builtins", "getattr", Name("numpy", "ndarray"), "tofile"),
            Name("torch", "Tensor"),
            (_small_array(), place.marker),
            {},
        ),
    )


def _small_array() -> Build:
    """Return an array as NumPy pickles it."""
    empty = call("numpy._core.multiarray", "_reconstruct", Name("numpy", "ndarray"), (0,), b"b")
    kind = Build(call("numpy", "dtype", "u1", False, True), (3, "|", None, None, None, -1, -1, 0))
    return Build(empty, (1, (1,), kind, False, b"\x07"))


def _legacy(place: Place) -> bytes:
    """Return a checkpoint of the old serialization, whose object is the attack."""
    return b"".join(
        [
            pickled(0x1950A86A20F9469CFC6C, 2),
            pickled(1001, 2),
            pickled({"protocol_version": 1001, "little_endian": True, "type_sizes": {}}, 2),
            place.evil(),
            pickled([], 2),
        ]
    )


def _zip(place: Place) -> bytes:
    import zipfile

    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", place.evil())
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
    return out.getvalue()


@attack
def package_gadgets(place: Place) -> Variants:
    """What other widely installed packages evaluate and write."""
    text = place.expression
    yield "sympy.sympify", call("sympy", "sympify", text)
    yield (
        "sympy.eval_expr",
        call("sympy.parsing.sympy_parser", "eval_expr", text, {}, {"open": Name("builtins", "open")}),
    )
    yield (
        "yaml.unsafe_load",
        call("yaml", "unsafe_load", f"!!python/object/apply:os.mknod ['{place.marker}']"),
    )
    yield "psutil.Popen", method(call("psutil", "Popen", ["touch", place.marker]), "wait")
    yield "six.exec_", call("six", "exec_", text)
    yield "h5py.File", call("h5py", "File", place.marker, "w")
    yield "h5py._hl", call("h5py._hl.files", "File", place.marker, "w")
    yield "safetensors.save", call("safetensors.numpy", "save_file", {}, place.marker)
    yield "filelock", method(call("filelock", "FileLock", place.marker), "acquire")
    yield "fsspec", method(call("fsspec", "open", place.marker, "w"), "open")
    yield "setuptools.spawn", call("setuptools._distutils.spawn", "spawn", ["touch", place.marker])
    yield "mpmath", call("mpmath.libmp.backend", "exec_", text, {})
    yield (
        "pkg.jinja2",
        method(
            method(
                call("jinja2", "Environment"),
                "from_string",
                f"{{{{ cycler.__init__.__globals__.os.mknod('{place.marker}') }}}}",
            ),
            "render",
        ),
    )
    yield (
        "lightning.load",
        call(
            "lightning.fabric.utilities.cloud_io", "_load", place.beside("l.bin", _legacy(place)), None, False
        ),
    )
    yield "networkx", call("networkx", "write_adjlist", call("networkx", "Graph"), place.marker)


@attack
def builds(place: Place) -> Variants:
    """BUILD on classes and on modules changes what is called later."""
    namespace = Name("argparse", "Namespace")
    changed = Build(namespace, (None, {"__setstate__": EVAL}))
    yield "class", Discarded(changed, Build(call("argparse", "Namespace"), place.expression))
    module = Build(Name("torch", "serialization"), {"_get_layout": EVAL})
    yield "module", Discarded(module, call("torch.serialization", "_get_layout", place.expression))
    yield (
        "module.os",
        Discarded(Build(Name("os", "path"), {"join": EVAL}), call("posixpath", "join", place.expression)),
    )
    user = Build(Name(USER_MODULE, "Config"), (None, {"__setstate__": EXEC}))
    yield "users_class", Discarded(user, Build(call(USER_MODULE, "Config"), place.expression))
    yield "setstate", Build(Build(call("argparse", "Namespace"), {"__setstate__": EVAL}), place.expression)
    yield (
        "iterate",
        Build(Build(call("argparse", "Namespace"), {"__setstate__": Name("posix", "mknod")}), place.marker),
    )
    function = Build(Name("torch._utils", "_rebuild_tensor_v2"), {"__wrapped__": EVAL})
    yield (
        "function",
        Discarded(
            function,
            call(
                "operator",
                "call",
                call("builtins", "getattr", Name("torch._utils", "_rebuild_tensor_v2"), "__wrapped__"),
                place.expression,
            ),
        ),
    )
    appended = Build(call("argparse", "Namespace"), {"append": EVAL})
    protocol_free = Code(pickled(appended, 2)[2:-1] + pickled(place.expression, 2)[2:-1] + b"a")
    yield "append", protocol_free
    yield "extend", Code(pickled(appended, 2)[2:-1] + b"(" + pickled(place.expression, 2)[2:-1] + b"e")
    yield (
        "extend.list",
        Code(
            pickled(
                Build(
                    call("argparse", "Namespace"),
                    {"extend": call("functools", "partial", Name("builtins", "print"))},
                ),
                2,
            )[2:-1]
            + b"("
            + pickled(call("builtins", "exec", place.expression), 2)[2:-1]
            + b"e"
        ),
    )


@attack
def spelled_calls(place: Place) -> Variants:
    """INST, OBJ and NEWOBJ in place of REDUCE, and what becomes of the result."""
    for how in ("reduce", "inst", "obj"):
        made = call("posix", "mknod", place.marker, how=how)
        yield how, made
        yield f"{how}.popped", Discarded(made)
        yield f"{how}.pop_mark", Discarded(made, by_mark=True)
        yield f"{how}.in_tuple_key", {(made, 1): None}
        yield f"{how}.in_ordered_dict", call("collections", "OrderedDict", [("a", made)])
        yield f"{how}.in_state", Build(call("argparse", "Namespace"), {"a": made})
        yield f"{how}.as_argument", call("collections", "Counter", [1, Discarded(made, 2)])
    inst = call("logging", "FileHandler", place.marker, how="inst")
    yield "inst.class", inst
    yield "obj.class", call("logging", "FileHandler", place.marker, how="obj")


@attack
def getattr_chains(place: Place) -> Variants:
    """Attributes of what looks plain."""
    path = call("pathlib", "PosixPath", place.marker)
    write = call("builtins", "getattr", Name("pathlib", "PosixPath"), "write_text")
    yield "Path.write_text", Call(write, (path, "x"))
    yield "Path.touch", Call(call("builtins", "getattr", Name("pathlib", "PosixPath"), "touch"), (path,))
    yield (
        "Path.map",
        call(
            "builtins", "list", call("builtins", "map", call("builtins", "getattr", path, "touch"), [0o644])
        ),
    )
    yield (
        "ndarray.tofile",
        Call(call("builtins", "getattr", Name("numpy", "ndarray"), "tofile"), (_small_array(), place.marker)),
    )
    rebuild = Name("torch._utils", "_rebuild_tensor_v2")
    found = method(call("builtins", "getattr", rebuild, "__globals__"), "__getitem__", "__builtins__")
    yield "globals", Call(method(found, "__getitem__", "eval"), (place.expression,))
    yield (
        "self",
        Call(
            call(
                "builtins",
                "getattr",
                call("builtins", "getattr", Name("builtins", "len"), "__self__"),
                "eval",
            ),
            (place.expression,),
        ),
    )
    yield (
        "partial_getattr",
        Call(
            Call(call("functools", "partial", Name("builtins", "getattr"), _os()), ("mknod",)),
            (place.marker,),
        ),
    )


@attack
def dotted_names(place: Place) -> Variants:
    """Names that protocol 4 looks up attribute by attribute."""
    yield "torch", call("torch.serialization", "os.mknod", place.marker)
    yield "library", call("pathlib", "os.mknod", place.marker)
    yield "library.deep", call("logging", "os.path.os.system", place.command)
    yield "users_module", call(USER_MODULE, "os.mknod", place.marker)
    yield "users_module.system", call(USER_MODULE, "os.system", place.command)
    eval_ = call(USER_MODULE, "Config.__init__.__builtins__.get", "eval")
    yield "dunder.builtins", Call(eval_, (place.expression,))
    eval_ = call(USER_MODULE, "Config.__init__.__builtins__.__getitem__", "eval")
    yield "dunder.item", Call(eval_, (place.expression,))
    yield "main", call("__main__", "os.mknod", place.marker)
    yield "main.builtins", call("__main__", "__builtins__.eval", place.expression)
    yield "mp_main", call("__mp_main__", "os.mknod", place.marker)
    yield "codecs", call("codecs", "builtins.eval", place.expression)
    yield "enum", call("enum", "bltns.eval", place.expression)
    yield "random", call("random", "_os.mknod", place.marker)
    yield "uuid", call("uuid", "os.mknod", place.marker)
    yield "numpy", call("numpy", "f2py.os.mknod", place.marker)
    yield "classmethod", call("pathlib", "PosixPath.touch", call("pathlib", "PosixPath", place.marker))


@attack
def users_names(place: Place) -> Variants:
    """A function of a module that nobody knows: unknown is the best that can be said."""
    yield "function", call(USER_MODULE, "make", place.marker)
    yield "popped", Discarded(call(USER_MODULE, "make", place.marker))
    yield "obj", call(USER_MODULE, "make", place.marker, how="obj")
    yield "state", Build(call(USER_MODULE, "Stateful"), place.marker)
