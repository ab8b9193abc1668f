"""Finding compilers, on machines that are laid out in different ways."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from headers import put

from jitkern.arch import Arch
from jitkern.compilers import find
from jitkern.errors import ToolchainError

# What nvcc answers to --version and to --dryrun; {root} is its toolkit.
FAKE_NVCC = """\
#!/bin/sh
case " $* " in
*" --version "*) echo "Cuda compilation tools, release 13.0, V13.0.88";;
*) echo '#$ _HERE_={root}/bin' >&2; echo '#$ TOP={root}/bin/..' >&2;;
esac
"""


def toolkit(root: Path, lib: str = "lib64", cudart: str = "libcudart.so") -> Path:
    put(root / "include/cuda_runtime.h")
    put(root / lib / cudart)
    put(root / "bin/nvcc", FAKE_NVCC.format(root=root))
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
    with pytest.raises(ValueError, match=r"expected one of 7\.5, 8\.0, .*, 12\.1 ") as caught:
        Arch.parse(text)
    assert repr(text) in str(caught.value)


def test_no_nvrtc_but_nvcc_names_it(machine: Callable[..., Path]) -> None:
    home = toolkit(machine() / "usr-local-cuda")
    with pytest.raises(ToolchainError) as raised:
        find.find_nvrtc()
    assert str(raised.value) == (
        'NVRTC (libnvrtc.so) was not found; pip install "jitkern[cuda]", or set '
        f"JITKERN_COMPILER=nvcc, for there is {home / 'bin/nvcc'}"
    )


@pytest.mark.parametrize(
    ("where", "version"),
    [
        ("site/nvidia/cu13/lib", "13.5"),
        ("site/nvidia/cuda_nvrtc/lib", "12.9"),
        ("home/lib64", "13.4"),  # CUDA_HOME
        ("usr-local-cuda/targets/x86_64-linux/lib", "13.0"),
        ("opt/cuda/lib64", "13.2"),  # beside the nvcc on PATH
        ("conda/lib", "13.1"),  # below sys.prefix
        ("usr-lib", "12.0"),
    ],
)
def test_nvrtc_places(machine: Callable[..., Path], where: str, version: str) -> None:
    path = nvrtc(machine(CUDA_HOME=machine() / "home") / where, version)
    if where.startswith("opt"):
        machine(PATH=toolkit(machine() / "opt/cuda") / "bin")
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


def test_nvcc_on_path_is_a_wrapper_script(machine: Callable[..., Path]) -> None:
    """The script lies beside nothing; the nvcc that it starts tells where its toolkit is."""
    home = toolkit(machine() / "opt/cuda")
    script = put(machine() / "bin/nvcc", f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n')
    found = find.find_cuda_home()
    assert (found.path, found.nvcc) == (home, script)
    assert find.find_nvcc().id == "nvcc-13.0.88"


def test_cuda_from_pip(machine: Callable[..., Path]) -> None:
    """CUDA 13 has only a numbered libcudart; CUDA 12 is spread over one directory per package."""
    site = machine() / "site/nvidia"
    home = toolkit(site / "cu13", "lib", "libcudart.so.13")
    found = find.find_cuda_home()
    assert (found.nvcc, found.cudart) == (home / "bin/nvcc", home / "lib/libcudart.so.13")
    shutil.rmtree(home)
    find._find_cuda_home.cache_clear()
    put(site / "cuda_nvcc/bin/nvcc", FAKE_NVCC.format(root=site / "cuda_nvcc"))
    put(site / "cuda_nvcc/include/crt/host_config.h")
    put(site / "cuda_runtime/include/cuda_runtime.h")
    put(site / "cuda_runtime/lib/libcudart.so.12")
    found = find.find_cuda_home()
    assert found.include_dirs == (site / "cuda_runtime/include", site / "cuda_nvcc/include")
    assert found.cudart == site / "cuda_runtime/lib/libcudart.so.12"


def test_cxx_from_the_environment(machine: Callable[..., Path]) -> None:
    banner = "#!/bin/sh\necho 'Ubuntu clang version 18.1.3 (1ubuntu1)'\n"
    path = put(machine() / "odd/clang++", banner)
    machine(CXX=f"{path} -m64")
    found = find.find_cxx()
    assert (found.command, found.id) == ((str(path), "-m64"), "clang-18.1.3")


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
        (find.find_cxx, {"CXX": "/bin/false"}, r"/bin/false --version does not work; install g"),
    ],
)
def test_what_is_missing_is_named(
    machine: Callable[..., Path], lookup: Callable[[], object], variables: dict[str, str], says: str
) -> None:
    machine(**variables)
    with pytest.raises(ToolchainError, match=says):
        lookup()
