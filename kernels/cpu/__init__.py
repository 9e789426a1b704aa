"""The native CPU backend: C++ for each instruction set behind a C interface, chosen at run time."""
