"""``rename``: new names by a template, and updates of the files that hold the old ones."""
