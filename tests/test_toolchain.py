"""Finding compilers, on machines that are laid out in different ways."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from headers import put

from jitkern.arch import Arch
from jitkern.compilers import find
from jitkern.errors import ToolchainError

FAKE_NVCC = """\
#!/bin/sh
echo "Cuda compilation tools, release 13.0, V13.0.88"
"""


def toolkit(root: Path, lib: str = "lib64", cudart: str = "libcudart.so") -> Path:
    put(root / "include/cuda_runtime.h")
    put(root / lib / cudart)
    put(root / "bin/nvcc", FAKE_NVCC)
    return root


def nvrtc(lib: Path, version: str = "13.5") -> Path:
    put(lib / f"libnvrtc-builtins.so.{version}")
    return put(lib / f"libnvrtc.so.{version.split('.')[0]}")


@pytest.mark.parametrize(
    ("text", "sm"),
    [
        *((text, "sm_90") for text in ("9.0", "9", "90", "compute_90", " 9.0 ")),
        *(("9.0a", "sm_90a"), ("100f", "sm_100f"), ("120", "sm_120")),
    ],
)
def test_arch_spellings(text: str, sm: str) -> None:
    arch = Arch.parse(text)
    assert (arch.sm, arch.compute) == (sm, sm.replace("sm", "compute"))
    assert Arch.parse(arch.sm) == Arch.parse(str(arch)) == arch


@pytest.mark.parametrize("text", ["99", "", "hopper", "8.0a", "9.0f", "9.00", "-9.0"])
def test_unknown_arch_lists_the_known(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected one of 8\.0, .*, 12\.1 ") as caught:
        Arch.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("where", "version"),
    [
        ("site/nvidia/cu13/lib", "13.5"),
        ("site/nvidia/cuda_nvrtc/lib", "12.9"),
        ("home/lib64", "13.4"),  # CUDA_HOME
        ("usr-local-cuda/targets/x86_64-linux/lib", "13.0"),
        ("usr-lib", "12.0"),
    ],
)
def test_nvrtc_places(machine: Callable[..., Path], where: str, version: str) -> None:
    path = nvrtc(machine(CUDA_HOME=machine() / "home") / where, version)
    found = find.find_nvrtc()
    assert (found.path, found.version, found.id) == (path, version, f"nvrtc-{version}")


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
        find.find_nvrtc()
    with pytest.raises(ToolchainError, match="CUDA_HOME"):
        find.find_nvcc()


def test_toolkit_places(machine: Callable[..., Path]) -> None:
    """NVIDIA's wheel has only a numbered libcudart."""
    pip = toolkit(machine() / "site/nvidia/cu13", "lib", "libcudart.so.13")
    home = find.find_cuda_home()
    assert (home.nvcc, home.cudart) == (pip / "bin/nvcc", pip / "lib/libcudart.so.13")
    for place in ("usr-local-cuda", "opt/cuda"):
        root = toolkit(machine() / place)
        machine(PATH=machine() / "opt/cuda/bin")
        find._find_cuda_home.cache_clear()
        assert find.find_cuda_home().path == root
    machine(CUDA_HOME=pip)
    assert find.find_cuda_home().path == pip
    assert find.find_nvcc().id == "nvcc-13.0.88"


def test_cxx_from_the_environment(machine: Callable[..., Path]) -> None:
    banner = "#!/bin/sh\necho 'Ubuntu clang version 18.1.3 (1ubuntu1)'\n"
    path = put(machine() / "odd/clang++", banner)
    machine(CXX=f"{path} -m64")
    found = find.find_cxx()
    assert (found.command, found.id) == ((str(path), "-m64"), "clang-18.1.3")


def test_a_failed_look_at_the_compiler_is_not_kept(machine: Callable[..., Path]) -> None:
    """Without descriptors for a moment there was no compiler for the rest of the process."""
    busy = put(machine() / "busy")
    machine(CXX=put(machine() / "c++", f"#!/bin/sh\n[ -e {busy} ] && exit 7\necho g++ 12.2.0\n"))
    with pytest.raises(ToolchainError, match=r"c\+\+ --version does not work \(exit status 7\)"):
        find.find_cxx()
    busy.unlink()
    assert find.find_cxx().id == "gcc-12.2.0"


def test_a_relative_path_is_relative_to_this_directory(
    machine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build runs in a directory of its own: "tools/g++: not found"."""
    root = toolkit(machine() / "cuda").parent
    put(root / "tools/g++", "#!/bin/sh\necho 'g++ 12.2.0'\n")
    put(root / "tools/ninja", "#!/bin/sh\necho 1.11.1\n")
    monkeypatch.chdir(root)
    monkeypatch.setitem(sys.modules, "ninja", None)
    machine(PATH="tools:cuda/bin")
    assert find.find_cxx().command == (f"{root}/tools/g++",)
    assert find.find_ninja().command == (f"{root}/tools/ninja",)
    assert find.find_cuda_home().nvcc == root / "cuda/bin/nvcc"
    machine(CXX="tools/g++ -m64")
    assert find.find_cxx().command == (f"{root}/tools/g++", "-m64")


@pytest.mark.parametrize(
    ("lookup", "variables", "says"),
    [
        (find.find_nvrtc, {}, r'pip install "jitkern\[cuda\]"$'),
        (find.find_nvrtc, {"JITKERN_NVRTC": "/no/a.so"}, r"JITKERN_NVRTC: /no/a\.so is not a file"),
        (find.find_nvcc, {}, r"nvcc .*was not found; install the CUDA toolkit, or"),
        (find.find_nvcc, {"CUDA_HOME": "/no"}, r"CUDA_HOME: /no holds no CUDA toolkit"),
        (find.find_cxx, {}, r"a C\+\+ compiler was not found; install g\+\+"),
        (find.find_cxx, {"CXX": "/no/c++"}, r"CXX: '/no/c\+\+' was not found; install g\+\+"),
        (find.find_cxx, {"CXX": "g++ 'x"}, r"CXX: .*: No closing quotation; install g"),
        (
            find.find_cxx,
            {"CXX": "/bin/false"},
            r"/bin/false --version does not work \(exit status 1\); in",
        ),
    ],
)
def test_what_is_missing_is_named(
    machine: Callable[..., Path], lookup: Callable[[], object], variables: dict[str, str], says: str
) -> None:
    machine(**variables)
    with pytest.raises(ToolchainError, match=says):
        lookup()
