"""Agents of stable-baselines3: what of their zip is read and judged, besides what the contract asks."""

from __future__ import annotations

import base64
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool import Safety, Unsupported, convert, open_checkpoint, verify
from tests.support.opening import paths_in

FILES = Path(__file__).parents[2] / "fixtures" / "files" / "stable-baselines3"
Change = Callable[[str, bytes], bytes]


class Attack:
    def __reduce__(self) -> tuple[object, ...]:
        return eval, ("1",)


def rewritten(into: Path, change: Change, *, method: int = zipfile.ZIP_STORED, **more: bytes) -> Path:
    path = into / "agent.zip"
    with zipfile.ZipFile(FILES / "ppo.zip") as source, zipfile.ZipFile(path, "w", method) as target:
        for name in source.namelist():
            target.writestr(name, change(name, source.read(name)))
        for name, data in more.items():
            target.writestr(name, data)
    return path


def same(name: str, data: bytes) -> bytes:
    return data


def test_settings_and_the_number_of_steps_are_told() -> None:
    with open_checkpoint(FILES / "sac.zip") as checkpoint:
        assert checkpoint.training.step == 8
        assert checkpoint.producer.framework == "stable-baselines3"
        assert checkpoint.metadata["gamma"] == 0.99
        roles = {str(tensor.path[0]): tensor.role.value for tensor in checkpoint.tensors}
        assert roles["policy"] == "weights"
        assert {roles[f"{one}.optimizer"] for one in ("actor", "critic")} == {"optimizer"}


def test_it_is_found_in_a_directory_and_converted(tmp_path: Path) -> None:
    path = rewritten(tmp_path, same)
    assert paths_in(tmp_path) == [path]
    convert(path, tmp_path / "agent.safetensors")
    with open_checkpoint(path) as source, open_checkpoint(tmp_path / "agent.safetensors") as target:
        assert {name: tensor.tobytes() for name, tensor in source.items()} == {
            name: tensor.tobytes() for name, tensor in target.items()
        }


@pytest.mark.parametrize("where", ["data", "other.pkl"])
def test_pickles_anywhere_in_it_are_judged(where: str, tmp_path: Path) -> None:
    attack = pickle.dumps(Attack())

    def poisoned(name: str, data: bytes) -> bytes:
        if name != "data":
            return data
        told = json.loads(data)
        told["policy_kwargs"] = {":type:": "x", ":serialized:": base64.b64encode(attack).decode()}
        return json.dumps(told).encode()

    more = {} if where == "data" else {where: attack}
    path = rewritten(tmp_path, poisoned if where == "data" else same, **more)
    assert verify(path).safety is Safety.UNSAFE


def test_a_flipped_bit_of_a_weight_is_found(tmp_path: Path) -> None:
    path = rewritten(tmp_path, same)
    with open_checkpoint(path) as checkpoint:
        extent = checkpoint["policy.action_net.weight"].extent
    assert extent is not None
    data = bytearray(path.read_bytes())
    data[extent.offset] ^= 1
    path.write_bytes(data)
    assert [one.code for one in verify(path).findings if one.check == "checksum"] == ["checksum-mismatch"]


def test_compressed_files_of_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="compressed"):
        open_checkpoint(rewritten(tmp_path, same, method=zipfile.ZIP_DEFLATED))
