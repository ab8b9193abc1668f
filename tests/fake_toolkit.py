"""A CUDA toolkit whose nvcc is the C++ compiler, for what does not depend on what nvcc makes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from jitkern.env import settings

# FAKE_ARCH tells the archs' libraries apart. `nvcc` notes each call beside itself.
NVCC = """\
#!/bin/sh
case " $* " in *" --version "*) echo "Cuda compilation tools, release 13.0, V13.0.88"; exit;; esac
echo "$*" >> {root}/calls
for word; do
  shift
  case "$word" in
  -gencode=*) set -- "$@" "-DFAKE_ARCH=${{word##*sm_}}";;
  --expt-*) ;;
  -Xcompiler=*) set -- "$@" "${{word#-Xcompiler=}}";;
  *) set -- "$@" "$word";;
  esac
done
exec c++ -x c++ -isystem {root}/include "$@"
"""


@pytest.fixture
def fake_nvcc(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The toolkit is that of CUDA_HOME; its `calls` holds a line for each file that is compiled."""
    root = tmp_path_factory.mktemp("toolkit")
    for folder in ("bin", "include", "lib64"):
        (root / folder).mkdir()
    (root / "include" / "cuda_runtime.h").touch()
    (root / "bin" / "nvcc").write_text(NVCC.format(root=root))
    (root / "bin" / "nvcc").chmod(0o755)
    library = root / "lib64" / "libcudart.so"
    link = ["c++", "-shared", "-x", "c++", "/dev/null", "-Wl,-soname,libcudart.so.13", "-o"]
    subprocess.run([*link, str(library)], check=True)
    monkeypatch.setenv("CUDA_HOME", str(root))
    monkeypatch.delenv("CXX", raising=False)
    settings.cache_clear()
    return root


def calls(toolkit: Path) -> int:
    """How many files its nvcc has compiled."""
    file = toolkit / "calls"
    return len(file.read_text().splitlines()) if file.exists() else 0
