"""``python write_paddle.py DIR``: write Paddle's models, with what Paddle itself predicts with each."""

from __future__ import annotations

import os
import sys
import zlib  # noqa: F401 - before paddle, or its own copy of zlib answers Python's calls and crashes

import numpy as np
import paddle

RANDOM = np.random.default_rng(7)
X, IDS = RANDOM.random((3, 4), np.float32), RANDOM.integers(0, 10, (3, 2))
AROUND = (paddle.base.core.VarDesc.VarType.FEED_MINIBATCH, paddle.base.core.VarDesc.VarType.FETCH_LIST)


class Net(paddle.nn.Layer):
    """Two linear layers."""

    def __init__(self, hidden: int = 3) -> None:
        super().__init__()
        self.first = paddle.nn.Linear(4, hidden)
        self.last = paddle.nn.Linear(hidden, 2)

    def forward(self, batch):
        """Return two numbers for each row."""
        return self.last(paddle.tanh(self.first(batch)))


def record(name, inputs, outputs) -> None:
    """Write what a model gives, as a recording."""
    members = {f"input/{key}": value for key, value in inputs.items()}
    np.savez(name, **members, **{f"output/{key}": value for key, value in outputs.items()})


def layers() -> None:
    """Write a layer's parameters, the optimizer's state, and the layer as a program."""
    paddle.disable_static()  # what this process ran before may have enabled it
    Net()  # counts names up, so that those of the saved layer are not the first
    net = Net()
    optimizer = paddle.optimizer.Adam(parameters=net.parameters())
    net(paddle.to_tensor(X)).square().mean().backward()
    optimizer.step()
    net.eval()
    for name in ("net", "alone", "nested"):
        paddle.save(net.state_dict(), f"{name}.pdparams")
    paddle.save(optimizer.state_dict(), "net.pdopt")
    paddle.save({"model": net.state_dict(), "opt": optimizer.state_dict(), "epoch": 3}, "nested.pdparams")
    record("net.npz", {"0": X}, {"output": net(paddle.to_tensor(X)).numpy()})
    paddle.jit.save(net, "jit", [paddle.static.InputSpec([None, 4], "float32", name="x")])
    record("jit.npz", {"x": X}, {"output_0": net(paddle.to_tensor(X)).numpy()})
    net.first.weight.set_value(off_by_a_percent(net.first.weight.numpy()))
    paddle.save(net.state_dict(), "net_off.pdparams")


def off_by_a_percent(weight):
    """Return a weight with one value 1 % larger."""
    weight = np.array(weight)
    weight.flat[int(np.abs(weight).argmax())] *= 1.01
    return weight


def two_inputs() -> None:
    """Write a program of two feeds and two fetches in all the layouts, as it is and off by a little."""
    main, start = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, start):
        feeds, fetches = _two_inputs()
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(start)
    for mark in ("", "_off"):
        outputs = executor.run(main, feed={"x": X, "ids": IDS}, fetch_list=fetches)
        if not mark:
            record("two.npz", {"x": X, "ids": IDS}, {f"output_{at}": one for at, one in enumerate(outputs)})
        paddle.static.save_inference_model(f"two{mark}", feeds, fetches, executor, program=main)
        for name, filename in (("separate", None), ("combined", "__params__"), ("named", "weights")):
            _fluid(f"{name}{mark}", filename, feeds, fetches, executor)
        weight = paddle.static.global_scope().find_var("embedding_0.w_0").get_tensor()
        weight.set(np.float32(1.01) * np.array(weight), paddle.CPUPlace())


def _two_inputs():
    x = paddle.static.data("x", [-1, 4], "float32")
    ids = paddle.static.data("ids", [-1, 2], "int64")
    words = paddle.static.nn.embedding(ids, [10, 4]).sum(1)
    y = paddle.static.nn.fc(paddle.concat([paddle.static.nn.fc(x, 5), words], axis=1), 2)
    return [x, ids], [y, paddle.nn.functional.softmax(y)]


def _fluid(place, filename, feeds, fetches, executor) -> None:
    program = paddle.static.normalize_program(feeds[0].block.program, feeds, fetches)
    os.makedirs(place)
    with open(f"{place}/__model__", "wb") as stream:
        stream.write(paddle.static.serialize_program(feeds, fetches, program=program))
    stored = [one for one in program.list_vars() if one.persistable and one.type not in AROUND]
    paddle.static.io.save_vars(executor, place, program, vars=stored, filename=filename)


def small_ones() -> None:
    """Write programs without variables: one that doubles, one that sums a sequence, one that divides by 0."""
    for name, dtype, level, compute in (
        ("bare", "int64", 0, lambda x: x * 2),
        ("ragged", "float32", 1, lambda x: paddle.static.nn.sequence_lod.sequence_pool(x, "sum")),
        ("infinite", "float32", 0, lambda x: x / (x - x)),
    ):
        main, start = paddle.static.Program(), paddle.static.Program()
        with paddle.static.program_guard(main, start):
            x = paddle.static.data("x", [-1, 4], dtype, lod_level=level)
            executor = paddle.static.Executor(paddle.CPUPlace())
            paddle.static.save_inference_model(name, [x], [compute(x)], executor, program=main)


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    paddle.seed(5)
    layers()
    paddle.enable_static()
    two_inputs()
    small_ones()
