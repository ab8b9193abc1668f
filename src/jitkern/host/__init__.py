"""The host module: jitkern's own C++ as one library, built, loaded and wired to Python."""
