"""The command line: what it prints, its exit status, one line and no traceback for a mistake."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import jitkern
from jitkern.bench import Case, Impl
from jitkern.cache.store import Cache
from jitkern.cli import _parser, bench_cmd, demo, main
from jitkern.env import settings
from jitkern.host import module as host
from jitkern.jit import device as hints

Fresh = Callable[..., "subprocess.CompletedProcess[str]"]
Capture = pytest.CaptureFixture[str]

DIFFERS = "jitkern: error: demo: store_cache: ValueError: the result differs from the PyTorch"
CLI = "import sys; from jitkern.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(scope="module", autouse=True)
def host_module(session_cache: Path) -> Path:
    """Build the host module in the session's cache, not once more in each test's empty one."""
    host.module()
    return session_cache


def run(capsys: Capture, *argv: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of one command, in this process."""
    try:
        status = main(argv)
    except SystemExit as stop:  # --help and --version
        status = int(stop.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


def lines_of(out: str, source: str) -> list[str]:
    """The lines of warm's table that have `source`."""
    return [line for line in out.splitlines() if re.search(rf"\d\.\d +{source} ", line)]


# ------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize(
    "command",
    [
        "",
        "warm",
        "doctor",
        "cache",
        "cache list",
        "cache info",
        "cache clear",
        "cache export",
        "cache import",
        "cache verify",
        "demo",
        "bench",
        "clangd",
        "completion",
    ],
)
def test_help_has_an_example(capsys: Capture, command: str) -> None:
    status, out, _ = run(capsys, *command.split(), "--help")
    assert status == 0
    example = out.partition("example:\n")[2]
    assert example.startswith(f"  jitkern {command}".rstrip())


@pytest.mark.parametrize(
    "hint",
    [
        "build it beforehand with: jitkern warm",
        hints.warm_hint("store", "656", "9.0"),
        hints.warm_hint("merge", "128", "9.0", sized_by="head_dim"),
        hints.rows_hint("9.0"),
        hints.record_hint(),
        hints.record_hint("9.0"),
    ],
)
def test_what_messages_advise_is_a_command(hint: str) -> None:
    command = hint.partition("with: ")[2].split()
    assert command[0] == "jitkern"
    assert callable(_parser().parse_args(command[1:]).run)


def test_version(capsys: Capture) -> None:
    assert run(capsys, "--version")[:2] == (0, f"jitkern {jitkern.__version__}\n")


def test_help_imports_nothing_heavy(fresh_python: Fresh) -> None:
    code = f"""{CLI[: -len("sys.exit(main(sys.argv[1:]))")]}
try:
    main(["--help"])
except SystemExit:
    print(*sorted(sys.modules))
"""
    loaded = {name.partition(".")[0] for name in fresh_python(code).stdout.split()}
    assert not loaded & {"torch", "tvm_ffi", "rich", "ninja", "filelock", "ctypes", "subprocess"}


# --------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("", "required: COMMAND"),
        ("frob", "'frob'"),
        ("cache", "required: ACTION"),
        ("cache frob", "'frob'"),
        ("cache export", "FILE"),
        ("warm --op store", "warm: --op: 'store', expected along with --element-size, bytes"),
        ("warm --op store --head-dim 128", "'store', expected along with --element-size, bytes"),
        ("warm --op merge_state", "--op: 'merge_state', expected along with --head-dim, el"),
        ("warm --op merge --element-size 656", "'merge', expected along with --head-dim, el"),
        (
            "warm --op merge,store --head-dim 8",
            "'store', expected along with --element-size, bytes",
        ),
        (
            "warm --op merge --head-dim 128 --element-size 656",
            "warm: --element-size: [656], expected an op of store_cache, store, indexing, in",
        ),
        ("warm --op store --head-dim 1 --element-size 6", "--head-dim: [1], expected an op of"),
        ("warm --arch 9.0", "--arch: expected along with --element-size, --head-dim or --replay"),
        ("warm --check --out x", "warm: --out: given along with check, which writes nothing"),
        ("warm --element-size 0 --arch 9.0", "--element-size: '0', expected bytes of a row"),
        ("warm --element-size -3 --arch 9.0", "--element-size"),
        ("warm --element-size 6.5 --arch 9.0", "--element-size: '6.5'"),
        ("warm --element-size 1073741824 --arch 9.0", "bytes of a row, 1 to 1073741823 (see"),
        (f"warm --element-size {10**20} --arch 9.0", f"--element-size: '{10**20}', expected"),
        (f"warm --element-size 656,{'9' * 5000}", "99', expected bytes of a row, 1 to"),
        (
            "warm --head-dim 64,0 --arch 9.0",
            "--head-dim: '0', expected elements of a head, 1 to 26",
        ),
        ("warm --head-dim 268435456 --arch 9.0", "elements of a head, 1 to 268435455 (see"),
        ("warm --element-size , --arch 9.0", "--element-size"),
        ("warm --element-size 656 --arch 99", "--arch: '99', expected one of 7.5, 8.0"),
        ("warm --element-size 656 --arch 9.0,x", "--arch: 'x'"),
        (
            "warm --element-size 656 --arch 9.0 --op frob",
            "--op: 'frob', expected one of store_cache, store, indexing, index, h2d_gather, d2h_",
        ),
        ("warm --element-size 656 --arch 9.0 --jobs 0", "--jobs: '0', expected 1 or more"),
        ("warm --element-size 656 --unknown", "--unknown"),
        ("warm --elem 656", "--elem"),
        ("demo --unknown", "--unknown"),
    ],
)
def test_usage_error(capsys: Capture, argv: str, says: str) -> None:
    status, out, err = run(capsys, *argv.split())
    assert (status, out) == (2, "")
    assert err.startswith("jitkern: error: ")
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("cache import no.jkb", "no.jkb: no such bundle"),
        ("cache verify no.jkb", "no.jkb: no such bundle"),
        ("cache export e.jkb", "nothing to export"),
        ("warm --replay no.jsonl", "--replay: no.jsonl: No such file"),
        ("warm --replay bad.jsonl", "--replay: bad.jsonl:1: not a recorded specialisation"),
        ("cache import bad.jsonl", "bad.jsonl"),
    ],
)
def test_failure(
    capsys: Capture,
    empty_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    argv: str,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text("no such thing\n")
    Path("bad.jsonl").chmod(0o644)  # whatever the umask
    status, out, err = run(capsys, *argv.split())
    assert (status, out) == (1, "")
    assert err.startswith("jitkern: error: ")
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value", "status", "says"),
    [
        ("JITKERN_CACHE_MAX_BYTES", "plenty", 2, "JITKERN_CACHE_MAX_BYTES: 'plenty'"),
        ("JITKERN_ARCH", "99", 2, "JITKERN_ARCH: "),
        ("JITKERN_NVRTC", "/nowhere/libnvrtc.so", 1, "jitkern[cuda]"),
        ("JITKERN_CACHE_DIR", "/proc/version/cache", 1, "/proc/version/cache: cannot be written"),
        ("JITKERN_FREEZE", "1", 1, "and JITKERN_FREEZE=1 is set, which forbids to compile"),
    ],
)
def test_bad_environment(
    capsys: Capture,
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    status: int,
    says: str,
) -> None:
    if name != "JITKERN_ARCH":
        monkeypatch.setenv("JITKERN_ARCH", "9.0")
    monkeypatch.setenv(name, value)
    settings.cache_clear()
    # A row size of this test's own: nothing is in this process's memory.
    got, _, err = run(capsys, "warm", "--op", "store", "--element-size", "52429")
    assert got == status
    assert err.startswith("jitkern: error: ")
    assert says in err
    assert err.count("\n") == 1


def test_no_arch(
    capsys: Capture, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, no_gpu: None
) -> None:
    status, _, err = run(capsys, "warm", "--element-size", "656")
    assert status == 2
    for way in ("--arch", "JITKERN_ARCH", "GPU"):
        assert way in err


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jitkern.warming.gpu_archs", list)


def test_bench_of_an_installed_package(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inside = tmp_path / "lib" / "site-packages" / "jitkern" / "__init__.py"
    monkeypatch.setattr(bench_cmd.jitkern, "__file__", str(inside))
    status, _, err = run(capsys, "bench")
    assert status == 1
    assert "clone the repository" in err


# ------------------------------------------------------------------------------- warm and bundles


def test_warm_says_where_each_kernel_came_from(
    capsys: Capture, empty_cache: Path, host_module: Path, fresh_python: Fresh
) -> None:
    argv = ("warm", "--element-size", "48,80", "--op", "store", "--arch", "9.0,8.0")
    status, out, _ = run(capsys, *argv, "--jobs", "2")
    assert status == 0
    assert len(lines_of(out, "compiled")) == 8  # 2 row sizes, 2 index types, 2 archs
    assert len(Cache(empty_cache).entries()) >= 8
    assert out.splitlines()[-1].endswith(f"2 at a time, in {empty_cache}")

    # In a new process, through the real entry: no terminal, so no bar and no colour.
    done = fresh_python(CLI, *argv, env={"JITKERN_CACHE_PATH": str(host_module)})
    assert len(lines_of(done.stdout, "cached")) == 8
    assert done.stderr == ""
    assert "\x1b" not in done.stdout


def test_warm_out_is_a_cache(
    capsys: Capture, empty_cache: Path, host_module: Path, tmp_path: Path, fresh_python: Fresh
) -> None:
    argv = ("warm", "--element-size", "112", "--op", "index", "--arch", "9.0")
    out_dir = tmp_path / "carried"
    status, out, err = run(capsys, *argv, "--out", str(out_dir))
    assert (status, err) == (0, "")
    assert out.splitlines()[-1].endswith(f"JITKERN_CACHE_PATH={out_dir}")

    path = f"{out_dir}:{host_module}"
    env = {"JITKERN_CACHE_DIR": str(tmp_path / "other"), "JITKERN_CACHE_PATH": path}
    done = fresh_python(CLI, *argv, env=env)
    assert len(lines_of(done.stdout, "cached")) == 6
    assert len(lines_of(done.stdout, "compiled")) == 0


def test_bundle_there_and_back(capsys: Capture, empty_cache: Path, tmp_path: Path) -> None:
    argv = ("--element-size", "144", "--op", "index,store", "--arch", "9.0", "--arch", "8.0")
    assert run(capsys, "warm", *argv)[0] == 0
    file = str(tmp_path / "kernels.jkb")
    status, out, _ = run(capsys, "cache", "export", file, "--arch", "9.0", "--op", "store")
    assert (status, out.partition(" in ")[0]) == (0, "2 entries")
    assert run(capsys, "cache", "verify", file)[1].endswith("ok, 2 entries\n")

    assert "removed" in run(capsys, "cache", "clear")[1]
    assert run(capsys, "cache", "list")[1].startswith("0 entries")
    assert run(capsys, "cache", "import", file)[0] == 0
    listed = run(capsys, "cache", "list")[1]
    assert len(re.findall(r"^store +144, ", listed, re.MULTILINE)) == 2
    assert "2 entries" in listed
    assert run(capsys, "cache", "verify")[0] == 0
    info = run(capsys, "cache", "info")[1]
    assert str(empty_cache) in info
    assert "writable" in info


def test_a_damaged_entry_is_found(capsys: Capture, empty_cache: Path) -> None:
    assert run(capsys, "warm", "--element-size", "24", "--op", "store", "--arch", "9.0")[0] == 0
    artefact = next(empty_cache.rglob("*.cubin"))
    artefact.write_bytes(artefact.read_bytes()[:-1])
    status, out, err = run(capsys, "cache", "verify")
    assert status == 1
    assert artefact.name in out
    assert "1 damaged" in err


def test_replay_builds_what_was_recorded(
    capsys: Capture, empty_cache: Path, host_module: Path, tmp_path: Path, fresh_python: Fresh
) -> None:
    record = tmp_path / "run.jsonl"
    argv = ("warm", "--element-size", "176", "--op", "store", "--arch", "9.0")
    env = {"JITKERN_RECORD": str(record), "JITKERN_CACHE_PATH": str(host_module)}
    fresh_python(CLI, *argv, env=env)
    assert record.is_file()
    status, out, err = run(capsys, "warm", "--replay", str(record), "--arch", "8.0,9.0")
    assert (status, err) == (0, "")
    assert len(lines_of(out, "compiled")) == 2
    assert len(lines_of(out, "cached")) == 2
    status, out, _ = run(capsys, "warm", "--replay", str(record))
    assert len(lines_of(out, "cached")) == 2


# -------------------------------------------------------------------------------- doctor and demo


def test_doctor(capsys: Capture, empty_cache: Path) -> None:
    status, out, _ = run(capsys, "doctor")
    assert status == 0
    for what in ("python", "torch", "tvm-ffi", "NVRTC", "nvcc", "c++", "ninja", "host module"):
        assert re.search(rf"^{re.escape(what)} +(ok|note)", out, re.MULTILINE), what
    assert re.search(r"^indexing on cpu +ok", out, re.MULTILINE)
    assert str(empty_cache) in out


def test_doctor_says_what_to_do(
    capsys: Capture, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITKERN_NVRTC", "/nowhere/libnvrtc.so")
    monkeypatch.setenv("JITKERN_CACHE_DIR", "/proc/version/cache")
    settings.cache_clear()
    _, out, _ = run(capsys, "doctor")
    nvrtc = next(line for line in out.splitlines() if line.startswith("NVRTC"))
    assert 'pip install "jitkern[cuda]"' in nvrtc
    cache = next(line for line in out.splitlines() if line.startswith("cache"))
    assert "set JITKERN_CACHE_DIR" in cache


def test_doctor_fails_without_what_is_needed(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jitkern.errors import ToolchainError

    def find() -> None:
        raise ToolchainError("no C++ compiler was found; install g++")

    monkeypatch.setattr(host, "find", find)
    status, out, _ = run(capsys, "doctor")
    assert status == 1
    assert re.search(r"^host module +broken", out, re.MULTILINE)
    assert "broken: host module" in out


@pytest.mark.parametrize("writes", [True, False])
def test_demo_says_which_result_differs(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, writes: bool
) -> None:
    copy = Impl("jitkern", "ours", lambda: lambda b: b[1].copy_(b[0]) if writes else None)
    theirs = Impl("clone", "peer", lambda: lambda b: b[0].clone(), returns=True)
    one = Case(
        op="store",
        name="64 B",
        impls=[copy, theirs],
        bytes_moved=128,
        make=lambda _: (torch.ones(64).byte(), torch.empty(64).byte()),
        outputs=lambda b: (b[1],),
        reference=lambda b: (b[0],),
    )
    monkeypatch.setattr(demo, "_cases", lambda ctx: [one])
    monkeypatch.setattr(demo, "_compile", lambda: None)
    status, out, err = run(capsys, "demo")
    assert re.search(rf"^store_cache +64 B +{'ok' if writes else 'failed'} ", out, re.MULTILINE)
    assert (status, err) == (0, "") if writes else (status, err.startswith(DIFFERS)) == (1, True)


@pytest.mark.slow
def test_demo(fresh_python: Fresh) -> None:
    out = fresh_python(CLI, "demo").stdout
    for op in ("store_cache", "indexing", "h2d_gather"):
        assert re.search(rf"^{op} .* ok .*x *$", out, re.MULTILINE), op
