"""Sources to binaries: the compilers, where they are, what they read. Knows no cache."""
