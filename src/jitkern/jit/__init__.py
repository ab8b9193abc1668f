"""Just-in-time compilation: templates, toolchains, the compile routes, the cache and the loader."""
