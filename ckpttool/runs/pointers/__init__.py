"""Who names a checkpoint, and what is protected by it."""
