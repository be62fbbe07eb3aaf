"""New names for checkpoints, and all that has to follow them."""
