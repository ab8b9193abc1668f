"""Finding compilers, on machines that are laid out in different ways."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jitkern.arch import Arch
from jitkern.compilers import cxx, find
from jitkern.compilers.nvrtc import load_nvrtc
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
    # What the real machine has in these places is not on this one.
    monkeypatch.setattr(find, "SYSTEM_CUDA", tmp_path / "usr-local-cuda")
    monkeypatch.setattr(find, "_SYSTEM_LIBS", (tmp_path / "usr-lib",))
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


# ------------------------------------------------------------------------------------------ NVRTC


@pytest.mark.parametrize("where", ["PATH", "CUDA_HOME", "/usr/local/cuda"])
def test_no_nvrtc_but_nvcc_names_it(machine: Callable[..., Path], where: str) -> None:
    home = toolkit(machine() / ("usr-local-cuda" if where.startswith("/") else "opt/cuda"))
    machine(**{where: home / "bin" if where == "PATH" else home} if where.isupper() else {})
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
        ("usr-local-cuda/lib64", "12.4"),
        ("usr-local-cuda/targets/x86_64-linux/lib", "13.0"),
        ("lib", "13.1"),  # sys.prefix/lib: conda
        ("usr-lib", "12.0"),
    ],
)
def test_nvrtc_places(machine: Callable[..., Path], where: str, version: str) -> None:
    path = nvrtc(machine() / where, version)
    found = find.find_nvrtc()
    assert (found.path, found.version, found.id) == (path, version, f"nvrtc-{version}")


def test_nvrtc_order(machine: Callable[..., Path]) -> None:
    root = machine()
    places = ["elsewhere", "site/nvidia/cu13/lib", "home/lib64", "ldpath"]
    paths = [nvrtc(root / place, f"13.{n}") for n, place in enumerate(places)]
    machine(JITKERN_NVRTC=paths[0], CUDA_HOME=root / "home", LD_LIBRARY_PATH=root / "ldpath")
    assert find.find_nvrtc().path == paths[0]
    for before, path in zip(["", *paths[1:]], paths[1:], strict=False):
        machine(JITKERN_NVRTC="")
        if before:
            Path(before).unlink()
        find._find_nvrtc.cache_clear()
        assert find.find_nvrtc().path == path


def test_nvrtc_beside_an_nvcc_on_path(machine: Callable[..., Path]) -> None:
    home = toolkit(machine() / "opt/cuda")
    path = nvrtc(home / "lib64", "13.0")
    machine(PATH=home / "bin")
    assert find.find_nvrtc().path == path


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
    with pytest.raises(ValueError, match=r"build: sources: /locked/a\.cc does not exist"):
        cxx.build("m", sources=[Path("/locked/a.cc")], directory=Path("/locked"))
    assert find.given_id(["a.h"], [Path("/locked")]) == ""
    assert find._include_dirs([Path("/locked")]) == ()


def test_nvrtc_version_of_its_own_major(machine: Callable[..., Path]) -> None:
    """Two CUDA versions in one directory: the builtins of the library's own major count."""
    lib = machine() / "both"
    nvrtc(lib, "12.9")
    machine(JITKERN_NVRTC=nvrtc(lib, "13.1"))
    assert find.find_nvrtc().version == "13.1"


def test_real_nvrtc_version_is_the_librarys_own() -> None:
    try:
        found = find.find_nvrtc()
    except ToolchainError as error:
        pytest.skip(str(error))
    assert load_nvrtc(found.path).version == found.version


def test_nvrtc_starts_nothing_and_finding_it_loads_nothing(fresh_python) -> None:
    code = """
import subprocess, sys
def refuse(*args, **kwargs): raise SystemExit(f"started {args}")
subprocess.Popen.__init__ = refuse
from jitkern.arch import Arch
from jitkern.errors import ToolchainError
from jitkern.compilers import nvrtc
from jitkern.compilers.find import find_nvrtc
try: found = find_nvrtc()
except ToolchainError: sys.exit()
assert "libnvrtc" not in open("/proc/self/maps").read()
nvrtc.compile("__global__ void k() {}", name="k.cu", headers={}, arch=Arch(9, 0))
assert not {"ninja", "rich", "torch", "tvm_ffi"} & set(sys.modules)
"""
    fresh_python(code)


# ------------------------------------------------------------------------------------------- CUDA


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_cuda_home_given(machine: Callable[..., Path], variable: str) -> None:
    home = toolkit(machine() / "opt/cuda")
    machine(**{variable: home})
    found = find.find_cuda_home()
    assert (found.path, found.nvcc, found.lib_dir) == (home, home / "bin/nvcc", home / "lib64")
    assert found.ldflags == (f"-L{home}/lib64", "-lcudart")


def test_nvcc_on_path_is_a_wrapper_script(machine: Callable[..., Path]) -> None:
    """The script lies beside nothing; the nvcc that it starts tells where its toolkit is."""
    home = toolkit(machine() / "opt/cuda")
    script = put(machine() / "bin/nvcc", f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n')
    found = find.find_cuda_home()
    assert (found.path, found.nvcc) == (home, script)
    assert find.find_nvcc().id == "nvcc-13.0.88"


def test_broken_nvcc_on_path_is_passed_over(machine: Callable[..., Path]) -> None:
    put(machine() / "bin/nvcc", "#!/bin/sh\nexit 1\n")
    home = toolkit(machine() / "usr-local-cuda")
    assert find.find_cuda_home().path == home


def test_cuda_13_from_pip(machine: Callable[..., Path]) -> None:
    """No libcudart.so there, only the numbered one."""
    home = toolkit(machine() / "site/nvidia/cu13", "lib", "libcudart.so.13")
    found = find.find_cuda_home()
    assert found.nvcc == home / "bin/nvcc"
    assert found.ldflags == (f"-L{home}/lib", "-l:libcudart.so.13")


def test_cuda_12_from_pip(machine: Callable[..., Path]) -> None:
    """A toolkit spread over one directory a package."""
    site = machine() / "site/nvidia"
    put(site / "cuda_nvcc/bin/nvcc", FAKE_NVCC.format(root=site / "cuda_nvcc"))
    put(site / "cuda_nvcc/include/crt/host_config.h")
    put(site / "cuda_runtime/include/cuda_runtime.h")
    put(site / "cuda_runtime/lib/libcudart.so.12")
    found = find.find_cuda_home()
    assert found.include_dirs == (site / "cuda_nvcc/include", site / "cuda_runtime/include")
    assert found.ldflags == (f"-L{site}/cuda_runtime/lib", "-l:libcudart.so.12")


# --------------------------------------------------------------------------------- c++ and ninja


def test_cxx_from_the_environment(machine: Callable[..., Path]) -> None:
    banner = "#!/bin/sh\necho 'Ubuntu clang version 18.1.3 (1ubuntu1)'\n"
    path = put(machine() / "odd/clang++", banner)
    machine(CXX=f"{path} -m64")
    found = find.find_cxx()
    assert (found.command, found.id) == ((str(path), "-m64"), "clang-18.1.3")


def test_cxx_on_path(machine: Callable[..., Path]) -> None:
    path = put(machine() / "bin/g++", "#!/bin/sh\necho 'g++ (Debian 12.2.0-14) 12.2.0'\n")
    found = find.find_cxx()
    assert (found.path, found.id) == (path, "gcc-12.2.0")


def test_cxx_is_asked_again_when_it_changes(machine: Callable[..., Path]) -> None:
    path = put(machine() / "bin/c++", "#!/bin/sh\necho 'c++ 12.2.0'\n")
    assert find.find_cxx().version == "12.2.0"
    put(path, "#!/bin/sh\necho 'c++ (GCC) 13.1.0'\n")
    assert find.find_cxx().version == "13.1.0"


def test_ninja_is_that_of_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a dependency."""
    monkeypatch.setenv("PATH", "/nowhere")
    assert find.find_ninja().version >= "1.10"


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
        (
            find.find_nvrtc,
            {"JITKERN_NVRTC": "/no/lib.so"},
            r"JITKERN_NVRTC: /no/lib\.so is not a",
        ),
        (find.find_nvcc, {}, r"nvcc .*was not found; install the CUDA toolkit, or"),
        (find.find_nvcc, {"CUDA_HOME": "/no"}, r"CUDA_HOME: /no holds no CUDA toolkit"),
        (find.find_cxx, {}, r"no C\+\+ compiler was found; install g\+\+"),
        (find.find_cxx, {"CXX": "/no/c++"}, r"CXX: '/no/c\+\+' was not found; install g\+\+"),
        (find.find_cxx, {"CXX": "'open"}, r"CXX: \"'open\": No closing quotation; install g\+\+"),
        (find.find_cxx, {"CXX": "/bin/false"}, r"/bin/false --version does not work; install g"),
    ],
)
def test_what_is_missing_is_named(
    machine: Callable[..., Path], lookup: Callable[[], object], variables: dict[str, str], says: str
) -> None:
    machine(**variables)
    with pytest.raises(ToolchainError, match=says):
        lookup()
