"""Finding compilers, on machines that are laid out in different ways."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jitkern.arch import KNOWN_ARCHS, Arch
from jitkern.compilers import cxx, find, find_cuda, find_headers, find_nvrtc, identity
from jitkern.env import settings
from jitkern.errors import ToolchainError

# What nvcc answers to --version and to --dryrun; {root} is its toolkit.
FAKE_NVCC = """\
#!/bin/sh
case " $* " in
*" --version "*) echo "Cuda compilation tools, release 13.0, V13.0.88";;
*) echo '#$ _HERE_={root}/bin' >&2; echo '#$ TOP={root}/bin/..' >&2;;
esac
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """An empty machine: no pip packages, no CUDA; `machine(**variables)` sets its environment."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "site").mkdir()
    # The real /usr/local/cuda and the loader's cache are not on this machine.
    for module in (find_cuda, find_nvrtc):
        monkeypatch.setattr(module, "SYSTEM_CUDA", tmp_path / "usr-local-cuda")
    monkeypatch.setattr(find_nvrtc, "_LD_CACHE", tmp_path / "ld.so.cache")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX", "JITKERN_NVRTC", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)

    def configure(**variables: object) -> Path:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        settings.cache_clear()
        return tmp_path

    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    configure()
    yield configure
    monkeypatch.undo()
    settings.cache_clear()


def put(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def toolkit(root: Path, lib: str = "lib64", cudart: str = "libcudart.so") -> Path:
    put(root / "include/cuda_runtime.h")
    put(root / lib / cudart)
    put(root / "bin/nvcc", FAKE_NVCC.format(root=root))
    return root


def nvrtc(lib: Path, version: str = "13.5") -> Path:
    put(lib / f"libnvrtc-builtins.so.{version}")
    return put(lib / f"libnvrtc.so.{version.split('.')[0]}")


# ------------------------------------------------------------------------------------------- arch


@pytest.mark.parametrize("text", ["9.0", "9", "90", "sm_90", "compute_90", " 9.0 "])
def test_arch_spellings(text: str) -> None:
    arch = Arch.parse(text)
    assert arch == Arch(9, 0)
    assert (str(arch), arch.sm, arch.compute, arch.number) == ("9.0", "sm_90", "compute_90", 90)


@pytest.mark.parametrize(
    ("text", "sm"),
    [("9.0a", "sm_90a"), ("100f", "sm_100f"), ("12.1a", "sm_121a"), ("12", "sm_120")],
)
def test_arch_suffix(text: str, sm: str) -> None:
    assert Arch.parse(text).sm == sm
    assert Arch.parse(Arch.parse(text).sm) == Arch.parse(text)


@pytest.mark.parametrize(
    "text", ["99", "0.9", "1.2", "", "hopper", "8.0a", "9.0f", "9.0b", "sm90", "9.00", "-9.0"]
)
def test_unknown_arch_lists_the_known(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected one of 7\.5, 8\.0, .*, 12\.1 ") as caught:
        Arch.parse(text)
    assert repr(text) in str(caught.value)


def test_archs_are_ordered() -> None:
    assert list(KNOWN_ARCHS) == sorted(KNOWN_ARCHS)
    assert Arch(9, 0) < Arch(10, 0) < Arch(10, 0, "a")


# ------------------------------------------------------------------------------------------ NVRTC


def test_no_nvrtc_names_the_extra(machine: Callable[..., Path]) -> None:
    with pytest.raises(ToolchainError, match=r'pip install "jitkern\[cuda\]"$'):
        find_nvrtc.find_nvrtc()


@pytest.mark.parametrize("where", ["PATH", "CUDA_HOME", "/usr/local/cuda"])
def test_no_nvrtc_but_nvcc_names_it(machine: Callable[..., Path], where: str) -> None:
    home = toolkit(machine() / ("usr-local-cuda" if where.startswith("/") else "opt/cuda"))
    machine(**{where: home / "bin" if where == "PATH" else home} if where.isupper() else {})
    with pytest.raises(ToolchainError) as raised:
        find_nvrtc.find_nvrtc()
    assert str(raised.value) == (
        'NVRTC (libnvrtc.so) was not found; pip install "jitkern[cuda]", or set '
        f"JITKERN_COMPILER=nvcc, for there is {home / 'bin/nvcc'}"
    )


@pytest.mark.parametrize(
    ("where", "version"),
    [
        ("site/nvidia/cu13/lib", "13.5"),
        ("site/nvidia/cuda_nvrtc/lib", "12.9"),
        ("usr-local-cuda/lib64", "12.4"),
        ("usr-local-cuda/targets/x86_64-linux/lib", "13.0"),
        ("lib", "13.1"),  # sys.prefix/lib: conda
    ],
)
def test_nvrtc_places(machine: Callable[..., Path], where: str, version: str) -> None:
    path = nvrtc(machine() / where, version)
    found = find_nvrtc.find_nvrtc()
    assert (found.path, found.version, found.id) == (path, version, f"nvrtc-{version}")


def test_nvrtc_order(machine: Callable[..., Path]) -> None:
    root = machine()
    places = ["elsewhere", "site/nvidia/cu13/lib", "home/lib64", "ldpath"]
    paths = [nvrtc(root / place, f"13.{n}") for n, place in enumerate(places)]
    machine(JITKERN_NVRTC=paths[0], CUDA_HOME=root / "home", LD_LIBRARY_PATH=root / "ldpath")
    assert find_nvrtc.find_nvrtc().path == paths[0]
    for before, path in zip(["", *paths[1:]], paths[1:], strict=False):
        machine(JITKERN_NVRTC="")
        if before:
            Path(before).unlink()
        find_nvrtc._find_nvrtc.cache_clear()
        assert find_nvrtc.find_nvrtc().path == path


def test_nvrtc_beside_an_nvcc_on_path(machine: Callable[..., Path]) -> None:
    home = toolkit(machine() / "opt/cuda")
    path = nvrtc(home / "lib64", "13.0")
    machine(PATH=home / "bin")
    assert find_nvrtc.find_nvrtc().path == path


def test_nvrtc_from_the_loaders_cache(machine: Callable[..., Path]) -> None:
    root = machine()
    path = nvrtc(root / "odd", "12.8")
    gone = b"/gone/libnvrtc.so.13\0"
    (root / "ld.so.cache").write_bytes(b"\x01\0libnvrtc.so.12\0" + bytes(path) + b"\0" + gone)
    assert find_nvrtc.find_nvrtc().path == path


def test_nvrtc_given_but_absent(machine: Callable[..., Path]) -> None:
    machine(JITKERN_NVRTC="/nowhere/libnvrtc.so")
    with pytest.raises(ToolchainError, match=r"JITKERN_NVRTC: /nowhere/libnvrtc\.so is not a file"):
        find_nvrtc.find_nvrtc()


def test_where_a_user_may_not_enter(
    machine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As below /root in a container: what cannot be seen is not there, and no PermissionError."""

    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    machine(JITKERN_NVRTC="/locked/libnvrtc.so", CUDA_HOME="/locked")
    for name in ("is_file", "is_dir", "exists"):  # what they do before Python 3.14
        monkeypatch.setattr(Path, name, refused)
    with pytest.raises(ToolchainError, match=r"JITKERN_NVRTC: /locked/libnvrtc\.so is not a file"):
        find_nvrtc.find_nvrtc()
    with pytest.raises(ToolchainError, match="CUDA_HOME"):
        find_cuda.find_nvcc()
    with pytest.raises(ValueError, match=r"build: sources: /locked/a\.cc does not exist"):
        cxx.build("m", sources=[Path("/locked/a.cc")], directory=Path("/locked"))
    assert find_headers._present([Path("/locked")]) == ()
    assert find_headers._include_dirs(Path("/locked")) == ()


def test_nvrtc_that_is_something_else(machine: Callable[..., Path]) -> None:
    """No builtins beside it tell a version, and it does not load either."""
    machine(JITKERN_NVRTC=put(machine() / "libnvrtc.so", "text"))
    with pytest.raises(ToolchainError, match=r"is no usable libnvrtc .*jitkern\[cuda\]"):
        find_nvrtc.find_nvrtc()


def test_nvrtc_version_of_its_own_major(machine: Callable[..., Path]) -> None:
    """Two CUDA versions in one directory: the builtins of the library's own major count."""
    lib = machine() / "both"
    nvrtc(lib, "12.9")
    machine(JITKERN_NVRTC=nvrtc(lib, "13.1"))
    assert find_nvrtc.find_nvrtc().version == "13.1"


def test_real_nvrtc_version_is_the_librarys_own() -> None:
    try:
        found = find_nvrtc.find_nvrtc()
    except ToolchainError as error:
        pytest.skip(str(error))
    assert find_nvrtc._loaded_nvrtc_version(found.path) == found.version


def test_finding_nvrtc_starts_and_loads_nothing(fresh_python) -> None:
    code = """
import os, subprocess
def refuse(*args, **kwargs): raise SystemExit(f"started {args}")
subprocess.Popen.__init__ = refuse
from jitkern.errors import ToolchainError
from jitkern.compilers.find_nvrtc import find_nvrtc
try: find_nvrtc()
except ToolchainError: pass
assert "libnvrtc" not in open("/proc/self/maps").read()
"""
    fresh_python(code)


# ------------------------------------------------------------------------------------------- CUDA


def test_no_cuda(machine: Callable[..., Path]) -> None:
    with pytest.raises(ToolchainError, match=r"nvcc .*was not found; install the CUDA toolkit, or"):
        find_cuda.find_nvcc()


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_cuda_home_given(machine: Callable[..., Path], variable: str) -> None:
    home = toolkit(machine() / "opt/cuda")
    machine(**{variable: home})
    found = find_cuda.find_cuda_home()
    assert (found.path, found.nvcc, found.lib_dir) == (home, home / "bin/nvcc", home / "lib64")
    assert found.ldflags == (f"-L{home}/lib64", "-lcudart")


def test_cuda_home_wrong(machine: Callable[..., Path]) -> None:
    machine(CUDA_HOME=machine() / "nowhere")
    with pytest.raises(ToolchainError, match=r"CUDA_HOME: .*/nowhere holds no CUDA toolkit"):
        find_cuda.find_cuda_home()


def test_nvcc_on_path_through_a_symlink(machine: Callable[..., Path]) -> None:
    home = toolkit(machine() / "opt/cuda")
    (machine() / "bin/nvcc").symlink_to(home / "bin/nvcc")
    assert find_cuda.find_cuda_home().path == home


def test_nvcc_on_path_is_a_wrapper_script(machine: Callable[..., Path]) -> None:
    """The script lies beside nothing; the nvcc that it starts tells where its toolkit is."""
    home = toolkit(machine() / "opt/cuda")
    script = put(machine() / "bin/nvcc", f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n')
    found = find_cuda.find_cuda_home()
    assert (found.path, found.nvcc) == (home, script)
    assert find_cuda.find_nvcc().id == "nvcc-13.0.88"


def test_broken_nvcc_on_path_is_passed_over(machine: Callable[..., Path]) -> None:
    put(machine() / "bin/nvcc", "#!/bin/sh\nexit 1\n")
    home = toolkit(machine() / "usr-local-cuda")
    assert find_cuda.find_cuda_home().path == home


def test_cuda_13_from_pip(machine: Callable[..., Path]) -> None:
    """No libcudart.so there, only the numbered one."""
    home = toolkit(machine() / "site/nvidia/cu13", "lib", "libcudart.so.13")
    found = find_cuda.find_cuda_home()
    assert found.nvcc == home / "bin/nvcc"
    assert found.ldflags == (f"-L{home}/lib", "-l:libcudart.so.13")


def test_cuda_12_from_pip(machine: Callable[..., Path]) -> None:
    """A toolkit spread over one directory a package."""
    site = machine() / "site/nvidia"
    put(site / "cuda_nvcc/bin/nvcc", FAKE_NVCC.format(root=site / "cuda_nvcc"))
    put(site / "cuda_nvcc/include/crt/host_config.h")
    put(site / "cuda_runtime/include/cuda_runtime.h")
    put(site / "cuda_runtime/lib/libcudart.so.12")
    found = find_cuda.find_cuda_home()
    assert found.include_dirs == (site / "cuda_nvcc/include", site / "cuda_runtime/include")
    assert found.ldflags == (f"-L{site}/cuda_runtime/lib", "-l:libcudart.so.12")


def test_lib_dir_of_the_target(machine: Callable[..., Path]) -> None:
    home = toolkit(machine() / "usr-local-cuda", "targets/x86_64-linux/lib")
    assert find_cuda.find_cuda_home().lib_dir == home / "targets/x86_64-linux/lib"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_real_nvcc_behind_a_wrapper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = put(tmp_path / "nvcc", f'#!/bin/sh\nexec {shutil.which("nvcc")} "$@"\n')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    settings.cache_clear()
    try:
        found = find_cuda.find_cuda_home()
        assert found.nvcc == script
        assert (found.lib_dir / found.cudart).is_file()
        assert any((path / "cuda_runtime.h").is_file() for path in found.include_dirs)
        assert find_cuda.find_nvcc().version.count(".") == 2
    finally:
        monkeypatch.undo()
        settings.cache_clear()


# --------------------------------------------------------------------------------- c++ and ninja


def test_cxx_from_the_environment(machine: Callable[..., Path]) -> None:
    banner = "#!/bin/sh\necho 'Ubuntu clang version 18.1.3 (1ubuntu1)'\n"
    path = put(machine() / "odd/clang++", banner)
    machine(CXX=f"{path} -m64")
    found = find.find_cxx()
    assert (found.command, found.id) == ((str(path), "-m64"), "clang-18.1.3")


@pytest.mark.parametrize(
    ("cxx", "flags"),
    [("", ()), ("g++", ()), ("g++ -DX=1 -m32", ("-DX=1", "-m32")), ("ccache g++ -m32", ("-m32",))],
)
def test_flags_in_cxx(machine: Callable[..., Path], cxx: str, flags: tuple[str, ...]) -> None:
    machine(CXX=cxx)
    assert find.cxx_flags() == flags


def test_the_nvcc_that_is_looked_at_is_the_one_that_is_used(machine: Callable[..., Path]) -> None:
    """That on PATH was, whatever CUDA_HOME says."""
    root = machine()
    put(root / "bin/c++", "\x7fELF")
    put(root / "bin/nvcc", "\x7fELF of the PATH")
    put(toolkit(root / "home") / "bin/nvcc", "\x7fELF")
    machine(CUDA_HOME=root / "home")
    stats = identity.program_stats(cuda=True)
    assert stats is not None
    used = (root / "home/bin/nvcc").stat()
    assert stats[1] == [used.st_mtime_ns, used.st_size]


def test_cxx_on_path(machine: Callable[..., Path]) -> None:
    path = put(machine() / "bin/g++", "#!/bin/sh\necho 'g++ (Debian 12.2.0-14) 12.2.0'\n")
    found = find.find_cxx()
    assert (found.path, found.id) == (path, "gcc-12.2.0")


def test_cxx_is_asked_again_when_it_changes(machine: Callable[..., Path]) -> None:
    path = put(machine() / "bin/c++", "#!/bin/sh\necho 'c++ 12.2.0'\n")
    assert find.find_cxx().version == "12.2.0"
    put(path, "#!/bin/sh\necho 'c++ (GCC) 13.1.0'\n")
    assert find.find_cxx().version == "13.1.0"


def test_no_cxx(machine: Callable[..., Path]) -> None:
    with pytest.raises(ToolchainError, match=r"no C.. compiler was found; install g"):
        find.find_cxx()
    machine(CXX="/nowhere/c++")
    with pytest.raises(ToolchainError, match=r"CXX: '/nowhere/c.+' was not found"):
        find.find_cxx()
    machine(CXX=put(machine() / "bin/c++", "#!/bin/sh\nexit 1\n"))
    with pytest.raises(ToolchainError, match="--version does not work"):
        find.find_cxx()


def test_ninja_needs_no_path() -> None:
    """It is a dependency: found beside the interpreter or in its package."""
    assert find.find_ninja().version >= "1.10"


def test_ninja_program_goes_before_a_script(machine: Callable[..., Path]) -> None:
    script = put(machine() / "bin/ninja", "#!/bin/sh\n")
    site = (str(machine() / "site"),)
    find_again = find._find_ninja.__wrapped__
    sys_executable = str(machine() / "bin/python")
    assert find_again(str(machine() / "bin"), sys_executable, ()) is not None
    program = machine() / "site/ninja/data/bin/ninja"
    put(program)
    program.write_bytes(b"\x7fELF...")
    script.chmod(0o755)
    found = find_again(str(machine() / "bin"), sys_executable, site)
    assert found is not None
    assert Path(found).read_bytes()[:4] == b"\x7fELF"
