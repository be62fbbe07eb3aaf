"""Which checkpoint to go on from."""
