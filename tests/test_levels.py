"""The shape of the source: imports go down the levels, one module reads the environment."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import jitkern

PACKAGE = Path(jitkern.__file__).parent

# Every module has a place, and may import from the lines above its own only. The levels are those
# of docs/design.md. A package's name stands for those of its modules that are not named.
LAYERS = """
0  errors env files forks free_memory hints
0  arch memfd unreadable writing
0  scratch
1  cache.tally
1  cache.strangers
1  cache.trust cache.schema cache.stats
1  cache.entry cache.cleanup
1  cache.lock cache.size cache.shelf cache.write
1  cache.store
1  cache.bundle cache.search
1  cache.get
1  compilers.find_nvrtc compilers.sources compilers.depends compilers.for_nvrtc
1  compilers.progress
1  compilers.find compilers.find_headers
1  compilers.find_cuda
1  compilers.identity compilers.load compilers.ninja compilers.nvrtc
1  compilers.cxx compilers.nvcc
2  host.build host.torch_state host.tuning
2  host.module
2  host.faults
3  jit.specialisation
3  jit.cubin jit.template jit.record jit.params
3  jit.launch jit.render jit.structs
3  jit.image jit.native jit.replay
3  jit.device
3  jit.loader
4  ops._ops
4  ops.common
4  torch_ops
4  ops.dispatch
4  ops.pairs ops.index_gradient ops.merge_gradient ops.merge_kernel
4  ops.merge_torch
4  ops
4  comm.protocol comm.nccl_library
4  comm.args
4  comm.rendezvous comm.peer_kernel
4  comm.torch_comm comm.nccl comm.descriptors comm.peer_reduce
4  comm.peer_memory
4  comm.peer_comm
4  comm.peer_rows
4  comm
5  untraced
5  nn.tp_embedding
5  nn
5  jobs
5  warming
5  offload.hostmem offload.streams offload.args offload.ranges offload.timeline
5  offload.block_pairs offload.ring_call
5  offload.snapshot offload.slots offload.depth offload.ring_slot offload.ring_server
5  offload.metrics offload.session
5  offload.monitor offload.runs
5  offload.memory
5  offload.pipeline offload.mover
5  offload.pool
5  offload.caches offload.ring_memory
5  offload.ring
5  offload.engine
5  offload
5  calibration
5  bench.case bench.timing
5  perf bench.report
5  bench.measure
5  bench.counts bench.baseline
5  bench.ci
5  bench
6  cli.ui
6  cli.filters cli.kernels_wheel cli.machine
6  cli.bench_cmd cli.cache_cmd cli.clangd cli.completion cli.demo cli.doctor cli.warm
6  cli
6  __main__
"""
RANK = {module: rank for rank, line in enumerate(LAYERS.split("\n")) for module in line.split()[1:]}

# What the rooms below the ops show to others: a name that is not here stays inside.
SHOWN = {
    "cache": """
        Buildable BuildOutput Bundle Cache Entry EntryInfo KERNELS Key Lookup LookupEvent
        MAX_UNPACKED_BYTES build_lock caches copy_entries export_bundle find folders forbidden_by
        freeze get get_or_build import_bundle is_frozen on_compile owner_and_mode read_bundle
        search stats unfreeze user_cache written_by_others
    """,
    "compilers": """
        CSRC Closure CudaHeaders DEVICE_STD INCLUDE_DIRS Image NVRTC_HINT OWN_PREFIX Nvrtc Tool
        check_options cxx cxx_flags depends find_cuda_home find_cxx find_headers find_ninja
        find_nvcc find_nvrtc given_id include_closure include_dirs is_cpp17 is_cuda_headers
        load_library nvcc nvrtc platform_abi program_stats quiet source_path toolchain_directories
        toolchain_id words
    """,
    "host": "check is_of_earlier_call module tuning",
    "jit": """
        CppArgs DeviceModule KernelConfig PRELUDE Recorded Specialisation compiler_id has_cuda
        load_aot load_device load_jit load_own make_cpp_args native_library replay
    """,
}
READS_ENVIRONMENT = {"environ", "environb", "getenv", "getenvb"}

MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path != PACKAGE / "__init__.py"
}


def rank(module: str) -> int:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        found = RANK.get(".".join(parts[:length]))
        if found is not None:
            return found
    pytest.fail(f"jitkern.{module} has no place: give it one in tests/test_levels.py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module below jitkern) of every import, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            # `from jitkern.jit import cache` names a module, `from jitkern.errors import X` not.
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name if name[8:] in MODULES else str(node.module) for name in inner]
        else:
            continue
        yield from ((node.lineno, name[8:]) for name in found if name.startswith("jitkern."))


@pytest.mark.parametrize("module", [name for name in MODULES if name not in SHOWN])
def test_imports_go_down(module: str) -> None:
    for line, target in imports(MODULES[module]):
        if module == target.rpartition(".")[0] or target == module.rpartition(".")[0]:
            continue  # ops/__init__.py lists the ops, cli/__init__.py the commands
        assert rank(target) < rank(module), f"{MODULES[module]}:{line}: imports jitkern.{target}"


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("cache.")])
def test_the_cache_knows_no_compiler(module: str) -> None:
    assert not [to for _, to in imports(MODULES[module]) if to.startswith("compilers")]


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("compilers.")])
def test_the_compilers_know_no_cache(module: str) -> None:
    assert not [to for _, to in imports(MODULES[module]) if to.startswith("cache")]


def test_few_names_go_from_room_to_room() -> None:
    used: dict[str, set[str]] = {room: set() for room in SHOWN}
    for path in [*MODULES.values(), PACKAGE / "__init__.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("jitkern."):
                room = str(node.module).split(".")[1]
                if room in SHOWN and PACKAGE / room not in path.parents:
                    used[room] |= {alias.name for alias in node.names}
    assert used == {room: set(names.split()) for room, names in SHOWN.items()}


@pytest.mark.parametrize("module", [name for name in MODULES if name.split(".")[0] in SHOWN])
def test_no_room_below_the_ops_knows_them_or_the_command_line(module: str) -> None:
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            docstring = "\n" in node.value
            assert docstring or "jitkern warm" not in node.value, "hints.py names the commands"
            assert docstring or node.value != "ops", f"{module}:{node.lineno}"


def test_every_place_is_taken() -> None:
    missing = set(RANK) - set(MODULES)
    assert not missing, "named in LAYERS, but there is no such module"


def test_only_env_reads_the_environment() -> None:
    for module, path in MODULES.items():
        if module == "env":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "attr", None) or getattr(node, "id", None)
            assert name not in READS_ENVIRONMENT, f"{path}:{node.lineno}: reads the environment"
