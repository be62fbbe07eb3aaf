"""A Dense behind a Flatten: alike in all files of Keras, undecided where it may be in another order."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpttool import ConvertOptions, Difference, DiffOptions, convert, diff
from tests.support.commands import Run
from tests.support.frameworks import python_with_frameworks

pytestmark = pytest.mark.framework

MADE = """
import os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras, numpy as np, tensorflow as tf, torch

os.chdir(sys.argv[1])
K = keras.layers
keras.utils.set_random_seed(3)
NETS = {
    "image": [K.Input((6, 6, 2)), K.Conv2D(4, 3, name="conv"), K.Flatten(), K.Dense(5, name="fc")],
    "single": [K.Input((6, 6, 2)), K.Conv2D(4, 3, name="conv"), K.Flatten(), K.Dense(1, name="fc")],
    "series": [K.Input((6, 2)), K.Conv1D(4, 3, name="conv"), K.Flatten(), K.Dense(5, name="fc")],
    "first": [K.Input((6, 6, 2)), K.Flatten(), K.Dense(7, name="conv"), K.Dense(5, name="fc")],
}


def save(net, name):
    net.save(f"{name}.h5")
    net.save(f"{name}.keras")
    net.save_weights(f"{name}.weights.h5")
    tf.saved_model.save(net, f"{name}-savedmodel")
    tf.train.Checkpoint(model=net).write(f"{name}-tf/ckpt")


for name, layers in NETS.items():
    net = keras.Sequential(layers)
    save(net, name)
    kernel, bias = net.get_layer("fc").get_weights()
    if name == "image":
        conv, conv_bias = net.get_layer("conv").get_weights()
        given = np.random.default_rng(1).normal(size=(4, 6, 6, 2)).astype("f4")
        expected = net(given).numpy()
        right = kernel.reshape(4, 4, 4, 5).transpose(3, 2, 0, 1).reshape(5, 64)
        for title, weight in (("right", right), ("wrong", kernel.T)):
            twin = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.Flatten(), torch.nn.Linear(64, 5))
            arrays = conv.transpose(3, 2, 0, 1), conv_bias, weight, bias
            weights = [torch.from_numpy(one.copy()) for one in arrays]
            state = dict(zip(twin.state_dict(), weights, strict=True))
            twin.load_state_dict(state)
            off = np.abs(twin(torch.from_numpy(given).movedim(-1, 1)).detach().numpy() - expected).max()
            assert (off < 1e-5) if title == "right" else (off > 0.5), (title, off)
            named = {key.replace("0.", "conv.").replace("2.", "fc."): one for key, one in state.items()}
            torch.save(named, f"{title}.pth")
    kernel[3, 0] += 1
    net.get_layer("fc").set_weights([kernel, bias])
    save(net, f"{name}-changed")
"""
WHOLE = ("{}.h5", "{}.keras")
ALONE = ("{}.weights.h5", "{}-savedmodel", "{}-tf/ckpt")
NETS = ("image", "single", "series", "first")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nets")
    python_with_frameworks("-c", MADE, folder)
    return folder


def require_alike(found: Difference, *, renamed: bool = False) -> None:
    """Require that all tensors are compared, and equal; under other names, if that is expected."""
    assert (found.changed, found.added, found.removed, found.undecided) == ((), (), (), ())
    assert (found.broken, found.not_compared) == ((), ())
    assert found.compared == found.unchanged == 4
    assert found.equal or (renamed and found.renamed)


def require_one(found: Difference) -> None:
    """Require that one element of one tensor differs."""
    (change,) = found.changed
    assert (found.added, found.removed, found.undecided, found.not_compared) == ((), (), (), ())
    assert change.kind == "values" and change.statistics is not None
    assert (change.statistics.count, change.statistics.where) == (1, (3, 0))
    assert change.statistics.max_abs == pytest.approx(1)


@pytest.mark.parametrize("name", [*WHOLE, *ALONE])
@pytest.mark.parametrize("net", NETS)
def test_all_files_of_keras_hold_one_kernel(made: Path, net: str, name: str) -> None:
    for other in WHOLE:
        require_alike(diff(made / other.format(net), made / name.format(net)))
        require_alike(diff(made / name.format(net), made / other.format(net)))


@pytest.mark.parametrize("name", [*WHOLE, *ALONE])
@pytest.mark.parametrize("net", NETS)
def test_one_changed_element_is_told_as_keras_has_it(made: Path, net: str, name: str) -> None:
    require_one(diff(made / f"{net}.h5", made / name.format(f"{net}-changed")))
    require_one(diff(made / name.format(net), made / f"{net}-changed.keras"))


@pytest.mark.parametrize("name", WHOLE)
def test_a_configuration_tells_the_right_conversion_from_the_wrong_one(made: Path, name: str) -> None:
    require_alike(diff(made / name.format("image"), made / "right.pth"))
    (change,) = diff(made / "wrong.pth", made / name.format("image")).changed
    assert change.a.name == "fc.weight" and change.statistics is not None and change.statistics.count == 300


@pytest.mark.parametrize("name", ALONE)
def test_weights_alone_are_called_neither_equal_nor_different(made: Path, name: str) -> None:
    path = made / name.format("image")
    seen = {
        "right.pth": "300 of 320 elements differ in the usual layout",
        "wrong.pth": "equal in the usual layout",
    }
    for twin, wanted in seen.items():
        for found in (diff(path, made / twin), diff(made / twin, path)):
            (undecided,) = found.undecided
            assert undecided.seen == wanted and "it may follow a Flatten" in undecided.why
            assert (found.changed, found.added, found.removed) == ((), (), ())
            assert found.compared == found.unchanged == 3 and not found.equal


def test_what_is_undecided_is_said(made: Path, run: Run) -> None:
    status, out, err = run("diff", made / "image.weights.h5", made / "wrong.pth")
    first, *rest = out.splitlines()
    assert (status, err) == (1, "")
    assert first == "no certain difference found, but 1 tensor may be in another order: fc.0"
    assert (
        "? undecided: fc.0: equal in the usual layout, but it may follow a Flatten "
        "or precede a Reshape, which isn't recorded"
    ) in rest


def test_a_map_decides(made: Path, tmp_path: Path) -> None:
    told = tmp_path / "map.toml"
    told.write_text(
        '[[tensor]]\nfrom = "fc.0"\nto = "fc.weight"\nrule = "flatten"\nshape = [4, 4, 4]\n', "utf-8"
    )
    found = diff(made / "image.weights.h5", made / "right.pth", DiffOptions(mapping=str(told)))
    require_alike(found)


@pytest.mark.parametrize("target", ["made.safetensors", "made.pth", "made.npz", "made-tf.index"])
@pytest.mark.parametrize("name", [*WHOLE, *ALONE])
def test_what_was_converted_is_as_certain_as_its_source(
    made: Path, tmp_path: Path, name: str, target: str
) -> None:
    source = made / name.format("image")
    path = convert(source, tmp_path / target, ConvertOptions(only="weights")).target
    require_alike(diff(path, source))
    # By what its variables were called, TensorFlow's own checkpoint knows them; what was made of it does not.
    require_alike(diff(path, made / "image.h5"), renamed=name in ALONE[1:])
    require_one(diff(path, made / name.format("image-changed")))
    right, wrong = (diff(path, made / one) for one in ("right.pth", "wrong.pth"))
    assert [len(one.undecided) for one in (right, wrong)] == [int(name in ALONE)] * 2
    assert right.changed == () and len(wrong.changed) == int(name in WHOLE)
