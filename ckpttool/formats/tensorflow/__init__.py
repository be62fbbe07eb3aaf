"""TensorFlow's checkpoints of both versions, and the state file beside them."""
