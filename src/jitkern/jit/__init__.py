"""``load_jit`` and ``load_aot``: templates, the device route, the C++ and CUDA routes."""
