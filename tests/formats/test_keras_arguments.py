"""Keys and types of a Keras configuration that Keras refuses, each one flipped bit away from a right one."""

from __future__ import annotations

import json
from pathlib import Path
from zipfile import ZipFile

import pytest

from ckpttool import Finding, open_checkpoint, verify

FILES = Path(__file__).parents[2] / "fixtures" / "files"
MODEL = FILES / "metrics" / "keras" / "weights.03-0.4894.keras"
MODELS = sorted(path for path in FILES.glob("*/*") if path.suffix in (".keras", ".h5", ".hdf5"))


def doubts(path: Path) -> list[Finding]:
    with open_checkpoint(path) as opened:
        return [finding for finding in opened.findings if finding.code == "keras-argument"]


def configured(place: Path, before: str, after: str) -> Path:
    """Return a copy of a model with a text of its configuration replaced once; all checksums are right."""
    path = place / "m.keras"
    with ZipFile(MODEL) as old, ZipFile(path, "w") as new:
        for record in old.infolist():
            content = old.read(record)
            if record.filename == "config.json":
                assert before.encode() in content
                content = content.replace(before.encode(), after.encode(), 1)
                json.loads(content)
            new.writestr(record.filename, content)
    return path


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"units"', '"unhts"'),
        ('"kernel_initializer"', '"kernel_initiali{er"'),
        ('"use_bias"', '"use_biAs"'),
        ('"trainable"', '"tbainable"'),
        ('"batch_shape"', '"batch_shap%"'),
        ('"registered_name"', '"registerud_name"'),
        ('"module"', '"modune"'),
        ('"config"', '"konfig"'),
        (
            '{"module": "keras.layers", "class_name": "Dense"',
            '{"module": "keras.layers", "clasw_name": "Dense"',
        ),
        ('"float32"', '"Float32"'),
        ('"compile_config": {"optimizer"', '"compile_config": {"opti-izer"'),
    ],
)
def test_what_keras_refuses(tmp_path: Path, before: str, after: str) -> None:
    """Keras 3.15 raises a TypeError, a ValueError or a KeyError for each."""
    verification = verify(configured(tmp_path, before, after))
    assert "keras-argument" in {finding.code for finding in verification.findings}


@pytest.mark.parametrize(
    "own",
    [
        '{"module": "mine", "class_name": "Dense", "config": {"unhts": 3}, "registered_name": "mine>Dense"}',
        '{"module": null, "class_name": "Dense", "config": {"unhts": 3}, "registered_name": "Dense"}',
        '{"module": "mine", "class_name": "C", "config": {"x": {"class_name": "Dense", "config": {"a": 1}}}}',
        '{"module": "keras.src.ops.numpy", "class_name": "Reshape", "config": {"newshape": [1]}}',
        '{"class_name": "Reshape", "config": {"newshape": [1]}}',
        '{"module": "keras.src.applications.convnext", "class_name": "LayerScale", "config": {"init": 1}}',
    ],
)
def test_others_take_what_they_like(own: str, tmp_path: Path) -> None:
    """Classes of one's own called like Keras's, what lies in their settings, and operations."""
    path = configured(tmp_path, '"trainable": true', f'"trainable": true, "activity_regularizer": {own}')
    assert [finding.message for finding in doubts(path)] == []


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)
def test_what_keras_wrote(path: Path) -> None:
    assert doubts(path) == []
