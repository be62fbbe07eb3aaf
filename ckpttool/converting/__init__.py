"""A checkpoint's content on its way to another format: what is taken, its names, types and layouts."""
