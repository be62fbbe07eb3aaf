"""A framework whose installation is broken."""

raise OSError("libtorch.so: cannot open shared object file")
