"""safetensors: a JSON header of names, types and offsets, then the elements of all tensors."""
