"""What people would write instead, as they would write it: scripts for ``python -c SCRIPT PATH``."""

from __future__ import annotations

LIST_TORCH = """
import sys, torch
for name, tensor in torch.load(sys.argv[1], mmap=True).items():
    print(name, tuple(tensor.shape), tensor.dtype)
"""

LIST_SAFETENSORS = """
import sys
from safetensors import safe_open
with safe_open(sys.argv[1], framework="numpy") as opened:
    for name in opened.keys():
        part = opened.get_slice(name)
        print(name, part.get_shape(), part.get_dtype())
"""

VERIFY_TORCH = """
import sys, torch
for name, tensor in torch.load(sys.argv[1]).items():
    if not torch.isfinite(tensor).all():
        sys.exit(f"{name} is not finite")
"""

LIST_DIRECTORY = """
import sys, torch
from pathlib import Path
for path in sorted(Path(sys.argv[1]).rglob("*.pth")):
    checkpoint = torch.load(path)
    print(path, checkpoint["epoch"], checkpoint["loss"])
"""

LIST_TENSORFLOW = """
import sys, tensorflow as tf
for name, shape in tf.train.list_variables(sys.argv[1]):
    print(name, shape)
"""

VERIFY_TENSORFLOW = """
import sys, numpy as np, tensorflow as tf
reader = tf.train.load_checkpoint(sys.argv[1])
for name, dtype in reader.get_variable_to_dtype_map().items():
    value = reader.get_tensor(name)
    if dtype.is_floating and not np.isfinite(value).all():
        sys.exit(f"{name} is not finite")
"""

LIST_KERAS = """
import sys, h5py, keras
with h5py.File(sys.argv[1]) as opened:
    opened.visititems(lambda name, item: print(name, getattr(item, "shape", ""), getattr(item, "dtype", "")))
"""

LIST_FLUID = """
import sys, paddle
paddle.enable_static()
for name, value in paddle.static.load_program_state(sys.argv[1]).items():
    print(name, value.shape, value.dtype)
"""

LIST_DCP = """
import sys
from torch.distributed.checkpoint import FileSystemReader
for name, entry in FileSystemReader(sys.argv[1]).read_metadata().state_dict_metadata.items():
    print(name, entry.size, entry.properties.dtype)
"""

RUN_STATE = """
import os, sys, torch
sys.path.insert(0, os.path.dirname(sys.argv[1]))
from net import Net
net = Net()
net.load_state_dict(torch.load(sys.argv[1]))
net.eval()
with torch.inference_mode():
    print(net(torch.rand(1, 1024)).isfinite().all())
"""

RUN_TORCHSCRIPT = """
import sys, torch
net = torch.jit.load(sys.argv[1]).eval()
with torch.inference_mode():
    print(net(torch.rand(1, 1024)).isfinite().all())
"""

RUN_SAVEDMODEL = """
import sys, numpy as np, tensorflow as tf
net = tf.saved_model.load(sys.argv[1])
outputs = net.signatures["serving_default"](x=tf.random.uniform((1, 1024)))
print({name: np.isfinite(output.numpy()).all() for name, output in outputs.items()})
"""

RUN_KERAS = """
import sys, keras, numpy as np
net = keras.models.load_model(sys.argv[1])
print(np.isfinite(np.asarray(net(np.random.rand(1, 1024).astype("float32")))).all())
"""

RUN_PADDLE = """
import sys, numpy as np, paddle
paddle.enable_static()
executor = paddle.static.Executor(paddle.CPUPlace())
prefix = sys.argv[1].removesuffix(".pdmodel")
program, feeds, fetches = paddle.static.load_inference_model(prefix, executor)
batch = np.random.rand(1, 1024).astype("float32")
print([np.isfinite(output).all() for output in executor.run(program, {feeds[0]: batch}, fetches)])
"""
