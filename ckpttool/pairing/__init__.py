"""Which tensor of one checkpoint is which of another: by names, layouts, content, or a map."""
