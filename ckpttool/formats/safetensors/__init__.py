"""safetensors: a header of names, types and offsets, and the tensors' bytes after it."""
