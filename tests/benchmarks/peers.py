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
import os, sys, torch
for name in sorted(os.listdir(sys.argv[1])):
    checkpoint = torch.load(os.path.join(sys.argv[1], name))
    print(name, checkpoint["epoch"], checkpoint["loss"])
"""
