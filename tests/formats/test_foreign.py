"""Formats that are named and not read."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from ckpttool import DamagedCheckpoint, NotACheckpoint, open_checkpoint
from ckpttool.storage import fs
from ckpttool.storage.source import Source
from tests.support.commands import Run

ARRAY = b"\xc7\x10\x01\x93\x91\x02\xa7float32\xc4\x02\0\0"


def zipped(*names: str) -> bytes:
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w") as archive:
            for name in names:
                archive.writestr(name, b"{}")
        return file.getvalue()


FILES = {
    # GraphDef: a node "x" of the operator Const; one of 300 bytes
    "frozen.pb": (b"\x0a\x0a\x0a\x01x\x12\x05Const\x22\x02\x08\x0c", "a frozen graph"),
    "large.pb": (b"\x0a\xac\x02\x0a\x0cMobile/input\x12\x0bPlaceholder" + bytes(280), "a frozen graph"),
    "agent.zip": (zipped("data", "parameters", "parameter_list"), "an agent of stable-baselines 2"),
    "net.zip": (zipped("configuration.json", "coefficients.bin"), "a model of Deeplearning4j"),
    "m.gguf": (b"GGUF\x03\0\0\0" + bytes(16), "a GGUF file"),
    "m.onnx": (b"\x08\x0a\x12\x07pytorch\x3a\x00", "an ONNX model"),
    "bare.onnx": (b"\x08\x0a\x3a\x04\x0a\x02\x0a\x00", "an ONNX model"),
    "m.msgpack": (b"\x81\xa6params\x81\xa1w" + ARRAY, "a Flax checkpoint"),
    "m.tflite": (b"\x1c\0\0\0TFL3" + bytes(20), "a TensorFlow Lite model"),
    "manifest.ocdbt": (b"\x0c\xdb\x3a\x2a" + bytes(20), "an OCDBT file"),
}


@pytest.mark.parametrize("name", FILES)
def test_it_is_named_and_exits_2(name: str, tmp_path: Path, run: Run) -> None:
    data, what = FILES[name]
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(NotACheckpoint, match=what):
        open_checkpoint(path)
    answer = run("verify", path)
    assert (answer.status, answer.out) == (2, "")
    assert what in answer.err
    assert "does not read; use " in answer.err


def test_beside_checkpoints_they_are_named(files: Path, tmp_path: Path, run: Run) -> None:
    shutil.copy(files / "pytorch" / "guide.pth", tmp_path)
    for name, (data, _) in FILES.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "sources.zip").write_bytes(zipped("a.py"))
    (tmp_path / "other.pb").write_bytes(b"\x0a\x03abc")
    status, _, err = run("verify", "-v", tmp_path)
    assert status == 0
    for name, (_, what) in FILES.items():
        assert what in err or name == "manifest.ocdbt"
    assert f"{tmp_path}/agent.zip: not verified, safety unknown: an agent of stable-baselines 2, which" in err
    assert f"{tmp_path}/frozen.pb: not verified" in err
    assert f"{tmp_path}/large.pb: not verified" in err
    assert "sources" not in err
    assert "other" not in err


def test_under_a_checkpoints_name_it_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "m.pth"
    path.write_bytes(FILES["m.gguf"][0])
    with pytest.raises(DamagedCheckpoint, match="a GGUF file"):
        open_checkpoint(path)


@pytest.mark.parametrize("marks", [["_CHECKPOINT_METADATA"], ["manifest.ocdbt"], ["10/state/_METADATA"]])
def test_directories_of_orbax(marks: list[str], tmp_path: Path) -> None:
    for mark in marks:
        (tmp_path / mark).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / mark).touch()
    with pytest.raises(NotACheckpoint, match="Orbax checkpoint"):
        open_checkpoint(tmp_path)


def tarred(*names: str) -> bytes:
    with io.BytesIO() as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            for name in names:
                member = tarfile.TarInfo(name)
                member.size = 700
                archive.addfile(member, io.BytesIO(bytes(700)))
        return file.getvalue()


UNKNOWN = "no format recognises the content"
UNREAD = {
    "a.skops": (zipped("schema.json"), "a skops file"),
    "a.pte": (b"\x30\0\0\0ET12", "an ExecuTorch program"),
    "a.mlmodel": (b"\x08\x04\x12\x00", "a Core ML model"),  # as an ONNX model may begin
    "catboost.mlmodel": (b"\x08\x01\x12\xaf0\n\x0f\n\tfeature_0\x1a\x02\x12\0", "a Core ML model"),
    "catboost.onnx": (b"\x08\x03\x12\x08CatBoost\x1a\xda\x02Git info:", "an ONNX model"),
    "a.cbm": (b"CBM1h$\0\0\x14\0\0\0", "a CatBoost model"),
    "a.ubj": (b"{L\0\0\0\0\0\0\0\x07learner{L\0\0\0\0\0\0\0\nattributes{}L", "an XGBoost model"),
    "A.ENGINE": (b"ftrt" + bytes(28), "a TensorRT engine"),
    "a.plan": (b"ptrt" + bytes(28), "a TensorRT engine"),
    "yolo.engine": (b"\x0b\0\0\0" + b'{"names":1}ftrt' + bytes(28), "a TensorRT engine"),
    "a.caffemodel": (b"\x0a\x07CaffeNet\xa2\x06\0", "a Caffe model"),
    "a.mar": (zipped("model.pt", "MAR-INF/MANIFEST.json"), "a TorchServe archive"),
    "a.nemo": (tarred("model_config.yaml", "model_weights.ckpt"), "a NeMo checkpoint"),
    "gz.nemo": (gzip.compress(tarred("./1_tokenizer.model", "./model_config.yaml")), "a NeMo checkpoint"),
    "a.tar": (tarred("README", "inner/model.pkl"), "a tar of models"),
    **{
        f"odd.{suffix}": (b"of another version", UNKNOWN)
        for suffix in ("gguf", "onnx", "tflite", "skops", "pte", "nemo", "mlmodel", "cbm", "caffemodel")
    },
    **{
        f"other.{suffix}": (b"{} of another program", "")
        for suffix in ("plan", "mar", "engine", "ubj", "msgpack", "tar", "zip", "pb")
    },
    "a.bin": (bytes(64), "an OpenVINO model"),
    "orbax/1/_CHECKPOINT_METADATA": (b"{}", "an Orbax checkpoint"),
    "orbax/1/default/_METADATA": (b"{}", ""),  # a part of the one above
    "orbax/1/default/manifest.ocdbt": (b"\x0c\xdb\x3a\x2a", ""),
    "orbax/2/state/_METADATA": (b"{}", "an Orbax checkpoint"),
    "a.xml": (b"<net/>", ""),
    "source.tar": (tarred("a.py"), ""),
    "notes.txt": (b"", ""),
}


DONE = {"verify": "verified, safety unknown", "list": "listed"}


@pytest.mark.parametrize("command", DONE)
def test_what_a_directory_has_that_is_not_read_is_named_and_counted(
    command: str, files: Path, tmp_path: Path, run: Run
) -> None:
    shutil.copy(files / "pytorch" / "guide.pth", tmp_path)
    for name, (data, _) in UNREAD.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    named = {
        name.partition("/_")[0].removesuffix("/state"): what for name, (_, what) in UNREAD.items() if what
    }
    status, _, err = run(command, "-v", tmp_path)
    assert status == 0
    said = {line.partition(": warning: ")[2].partition(": ")[0] for line in err.splitlines()}
    assert said == {str(tmp_path / name) for name in named}
    assert all(f"{tmp_path / name}: not {DONE[command]}: {what}" in err for name, what in named.items())
    lines = [line for line in err.splitlines() if UNKNOWN not in line]
    assert all(", which ckpttool does not read; use " in line for line in lines)
    document = json.loads(run(command, tmp_path, "--json").out)
    assert {one["path"] for one in document["unread"]} == said


@pytest.mark.parametrize("command", DONE)
def test_each_file_that_is_not_read_is_opened_once(
    command: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: data for name, (data, what) in UNREAD.items() if what and "/" not in name}
    for name, data in {
        **files,
        "0": b"text",
        "a.xml": b"<net/>",
    }.items():  # the first one tells of Fluid, too
        (tmp_path / name).write_bytes(data)
    opened: list[str] = []
    open_source = fs.open_source
    monkeypatch.setattr(fs, "open_source", lambda path: opened.append(path) or open_source(path))
    run(command, tmp_path)
    assert {name: opened.count(str(tmp_path / name)) for name in files} == dict.fromkeys(files, 1)


def test_of_a_long_tar_only_the_first_headers_are_read(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "long.tar").write_bytes(tarred(*(f"{at}.txt" for at in range(100)), "model.pkl"))
    reads: list[int] = []
    read = Source.read
    monkeypatch.setattr(
        Source, "read", lambda self, start, count: reads.append(start) or read(self, start, count)
    )
    run("list", tmp_path)
    assert 0 < len(reads) < 40


@pytest.mark.parametrize("options", [[], ["--strict"]])
def test_parts_tell_what_is_not_read(options: list[str], files: Path, tmp_path: Path, run: Run) -> None:
    shutil.copy(files / "pytorch" / "guide.pth", tmp_path)
    (tmp_path / "a.skops").write_bytes(b"")
    parts = [tmp_path / f"{number}.json" for number in (1, 2)]
    for number, part in enumerate(parts, 1):
        part.write_text(run("verify", tmp_path, "--json", "--part", f"{number}/2", *options).out)
    whole, merged = run("verify", tmp_path, *options), run("verify", "--merge", *parts)
    assert merged == whole
    assert f"{tmp_path / 'a.skops'}: not verified" in merged.err
    assert whole.status == len(options)


@pytest.mark.parametrize(
    ("name", "what"), [(name, what) for name, (_, what) in UNREAD.items() if "." in name]
)
def test_a_file_that_is_not_read_is_named_by_itself(name: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "a.xml").touch()
    path = tmp_path / Path(name).name
    path.write_bytes(UNREAD[name][0])
    if what:
        with pytest.raises(NotACheckpoint, match="not a checkpoint: " if what is UNKNOWN else what):
            open_checkpoint(path)


@pytest.mark.parametrize(
    "data", [b"\x08\x01\x12\x04\x0a\x02\x0a\x00", b"\x81", b"\x08", b"plain text", bytes(64), b"\x0a\x03abc"]
)
def test_what_only_looks_alike_is_not_named(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.dat"
    path.write_bytes(data)
    with pytest.raises(NotACheckpoint) as caught:
        open_checkpoint(path)
    assert "does not read" not in str(caught.value)


def test_a_link_names_what_a_cache_stores_without_a_suffix(files: Path, tmp_path: Path, run: Run) -> None:
    for name in ("blobs", "snapshots"):
        (tmp_path / name).mkdir()
    (tmp_path / "blobs" / "abc").write_bytes(b"GGUF\x03\0\0\0" + bytes(56))
    (tmp_path / "snapshots" / "m.gguf").symlink_to("../blobs/abc")
    shutil.copy(min((files / "safetensors").glob("*.safetensors")), tmp_path / "blobs" / "def")
    answer = run("verify", tmp_path, "--strict")
    assert (answer.status, "m.gguf: not verified" in answer.err) == (1, True)
