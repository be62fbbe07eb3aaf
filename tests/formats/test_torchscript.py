"""TorchScript archives: names, constants, code, and what lies beside them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile
from zlib import crc32

import pytest

from ckpttool import Checkpoint, DamagedCheckpoint, Role, Severity, Truncated, open_checkpoint

CALL = b"\x80\2cos\nsystem\nX\4\0\0\0true\x85R."


@pytest.fixture
def traced(files: Path) -> Path:
    return files / "torchscript" / "traced.pt"


@pytest.fixture
def scripted(files: Path) -> Path:
    return files / "torchscript" / "scripted.pt"


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """Return what writes an archive again with some records replaced, added, or left out (None)."""

    def change(path: Path, **records: bytes | None) -> Path:
        with ZipFile(path) as archive:
            held: dict[str, bytes | None] = {name: archive.read(name) for name in archive.namelist()}
        root = path.stem
        held |= {f"{root}/{name}": content for name, content in records.items()}
        with ZipFile(tmp_path / path.name, "w") as archive:
            for name, content in held.items():
                if content is not None:
                    archive.writestr(name, content)
        return tmp_path / path.name

    return change


def truth(path: Path) -> dict:
    return json.loads(path.with_name(f"{path.name}.expected.json").read_text("utf-8"))


def codes(checkpoint: Checkpoint) -> set[str]:
    return {finding.code for finding in (*checkpoint.findings, *checkpoint.safety)}


def test_constants_are_told_apart_from_the_models_tensors(traced: Path) -> None:
    expected = [told["sha256"] for told in truth(traced)["constants"]]
    with open_checkpoint(traced) as checkpoint:
        found = [tensor for tensor in checkpoint.tensors if tensor.path[0] == "constants"]
        assert [tensor.path for tensor in found] == [("constants", index) for index in range(len(expected))]
        assert [hashlib.sha256(tensor.tobytes()).hexdigest() for tensor in found] == expected
        assert {tensor.role for tensor in found} == {Role.OTHER}


def test_inputs_that_were_not_saved_are_no_damage(traced: Path) -> None:
    with open_checkpoint(traced) as checkpoint:
        assert codes(checkpoint) == set()
        assert not [tensor for tensor in checkpoint.tensors if "traced_inputs" in tensor.name]


def test_code_and_extra_files_are_listed(scripted: Path) -> None:
    with open_checkpoint(scripted) as checkpoint:
        told = checkpoint.metadata
    extra = {name: text.encode() for name, text in truth(scripted)["extra"].items()}
    assert told["extra"] == {
        name: f"<{len(text)} bytes, CRC-32 {crc32(text):08x}>" for name, text in extra.items()
    }
    assert "__torch__.fixture_models.ScriptedModel" in told["code"]


def test_values_behind_type_tags_are_data(scripted: Path) -> None:
    with open_checkpoint(scripted) as checkpoint:
        attributes = checkpoint.metadata["attributes"]
        assert attributes["<class>"] == "__torch__.fixture_models.ScriptedModel"
        assert attributes["factor"] == 3


@pytest.mark.parametrize(
    "record", ["constants.pkl", "traced_inputs.pkl", "code/__torch__/fixture_models.py.debug_pkl"]
)
def test_every_pickle_is_judged(traced: Path, changed, record: str) -> None:
    with open_checkpoint(changed(traced, **{record: CALL})) as checkpoint:
        assert "unsafe-import" in {finding.code for finding in checkpoint.safety}


def test_a_record_that_nothing_declares_is_judged(traced: Path, changed) -> None:
    with open_checkpoint(changed(traced, **{"more/bytecode.PKL": CALL})) as checkpoint:
        assert "unsafe-import" in {finding.code for finding in checkpoint.safety}


@pytest.mark.parametrize("name", ["model.json", "MODEL.json"])
def test_the_record_that_names_the_code_of_old_archives(traced: Path, changed, name: str) -> None:
    with open_checkpoint(changed(traced, **{name: b"{}"})) as checkpoint:
        assert "not-scanned" in {finding.code for finding in checkpoint.safety}


def test_the_object_is_judged_although_it_is_damaged(traced: Path, changed) -> None:
    with pytest.raises(DamagedCheckpoint) as caught:
        open_checkpoint(changed(traced, **{"data.pkl": CALL[:-1]}))
    assert {finding.code for finding in caught.value.safety} == {"unsafe-import"}


def test_a_damaged_pickle_without_tensors_is_a_finding(traced: Path, changed) -> None:
    path = changed(traced, **{"traced_inputs.pkl": b"\x80\2}("})
    with open_checkpoint(path) as checkpoint:
        assert [finding.code for finding in checkpoint.findings] == ["truncated"]
        assert {finding.code for finding in checkpoint.safety} == {"not-scanned"}


def test_pickles_behind_the_first(traced: Path, changed) -> None:
    with open_checkpoint(changed(traced, **{"constants.pkl": b"\x80\2)." + CALL})) as checkpoint:
        assert {"pickle-trailing", "unsafe-import"} <= codes(checkpoint)


def test_attributes_that_are_no_honest_calls(traced: Path, changed) -> None:
    path = changed(traced, **{"data.pkl": PACKED % b"})R"})
    with open_checkpoint(path) as checkpoint:
        assert "unsafe-pickle" in {finding.code for finding in checkpoint.safety}


def test_a_missing_storage(traced: Path, changed) -> None:
    for record in ("data/1", "constants/0"):
        with pytest.raises(DamagedCheckpoint) as caught:
            open_checkpoint(changed(traced, **{record: None}))
        assert caught.value.code == "storage-missing"


@pytest.mark.framework
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_class_that_the_code_lacks(scripted: Path, changed) -> None:
    import torch

    with ZipFile(scripted) as archive:
        held = archive.read("scripted/data.pkl")
    path = changed(scripted, **{"data.pkl": held.replace(b"ScriptedModel", b"ScriptedMode_")})
    with open_checkpoint(path) as checkpoint:
        assert [finding.code for finding in checkpoint.findings] == ["class-undefined"]
    with pytest.raises(RuntimeError, match="Unknown type name"):
        torch.jit.load(str(path))


@pytest.mark.parametrize("kept", [0.2, 0.5, 0.99])
def test_truncated_archives_are_still_recognised(
    traced: Path, scripted: Path, tmp_path: Path, kept: float
) -> None:
    for path in (traced, scripted):
        whole = path.read_bytes()
        cut = tmp_path / path.name
        cut.write_bytes(whole[: int(len(whole) * kept)])
        with pytest.raises(Truncated):
            open_checkpoint(cut)


@pytest.mark.parametrize(
    ("line", "code", "severity"),
    [
        (b"    y = ops.torchvision.nms(x, x, 0.5)\n", "custom-ops", Severity.WARNING),
        (b"    y = torch.ops.mine.load(x)\n", "custom-ops", Severity.WARNING),
        (b'    torch.save(x, "/nowhere")\n', "unsafe-op", Severity.ERROR),
        (b'    y = torch.from_file("/etc/passwd")\n', "unsafe-op", Severity.ERROR),
        (b"    y = ops.aten.from_file(x)\n", "unsafe-op", Severity.ERROR),
    ],
)
def test_operators_in_the_code(traced: Path, changed, line: bytes, code: str, severity: Severity) -> None:
    with open_checkpoint(changed(traced, **{"code/__torch__/more.py": line})) as checkpoint:
        assert [(finding.code, finding.severity) for finding in checkpoint.safety] == [(code, severity)]


@pytest.mark.parametrize(
    "line",
    [
        b"    y = ops.prim.data(x)\n    z = ops.quantized.linear(x)\n    v = torch.add(x, y)\n",
        b"  layer : __torch__.torchvision.ops.misc.Conv2d\n",
        b"    y = (self.ops.block).forward(x, )\n    z = torch.relu(x)\n",
    ],
)
def test_ordinary_code_is_no_finding(traced: Path, changed, line: bytes) -> None:
    with open_checkpoint(changed(traced, **{"code/__torch__/more.py": line})) as checkpoint:
        assert checkpoint.safety == ()


def test_byte_code_makes_it_a_lite_archive(traced: Path, changed) -> None:
    with open_checkpoint(changed(traced, **{"bytecode.pkl": b"\x80\2K\5\x85."})) as checkpoint:
        assert checkpoint.variant == "lite"


PACKED = b"\x80\2c__torch__\nNet\n)\x81}X\1\0\0\0pc__torch__\nPacked\n)\x81%sK\1\x86bsb."
TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\n"
    b"X\1\0\0\x000X\3\0\0\0cpuK\3tQK\0K\3\x85K\1\x85\x89}tR"
)


def test_weights_that_a_class_of_its_own_packs(traced: Path, changed) -> None:
    """Quantized layers keep a tuple in place of attributes."""
    path = changed(traced, **{"data.pkl": PACKED % TENSOR, "data/1": None, "data/2": None})
    with open_checkpoint(path) as checkpoint, ZipFile(traced) as archive:
        assert checkpoint["p.0"].tobytes() == archive.read("traced/data/0")
        assert checkpoint["p.0"].role is Role.WEIGHTS


@pytest.mark.framework
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_scripts_that_touch_files_are_compiled_to(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    source = "def forward(self, x):\n    torch.save(x, '/nowhere/file')\n    return x\n"
    module = torch.jit.ScriptModule()
    module.define(source)
    torch.jit.save(module, tmp_path / "saves.pt")
    with open_checkpoint(tmp_path / "saves.pt") as checkpoint:
        assert [finding.code for finding in checkpoint.safety] == ["unsafe-op"]
