"""Children that are forked are as new processes, for all that tests want of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

import forks
import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="lists /proc")


def test_what_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import json, os, sys
found = sys.argv, os.getcwd(), sorted(os.environ), sys.path[:2], __name__, __file__
json.dump([*found, sorted(map(int, os.listdir("/proc/self/fd")))[:-1]], sys.stdout)
print("to say", file=sys.stderr)
""")
    monkeypatch.chdir(tmp_path)
    done = forks.run(script, "a", "b", env={"PYTHONPATH": "/there", "OWN": "1"})
    assert (done.returncode, done.stderr) == (0, "to say\n")
    assert json.loads(done.stdout) == [
        *([str(script), "a", "b"], str(tmp_path), ["OWN", "PYTHONPATH"]),
        *([str(tmp_path), "/there"], "__main__", str(script), [0, 1, 2]),
    ]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(3)", 3),
        ("raise ValueError('wrong')", 1),
        ("import os; os.abort()", -signal.SIGABRT),
        (
            # Who starts pytest in the background has it ignore these.
            "from signal import *; signal(SIGINT, default_int_handler); raise_signal(SIGINT)",
            -signal.SIGINT,
        ),
    ],
)
def test_how_it_ends(code: str, status: int) -> None:
    done = forks.run(code)
    assert done.returncode == status
    assert ("wrong" in done.stderr) == ("wrong" in code)


def test_it_is_spoken_to_and_ended() -> None:
    echo = "import sys\nfor line in sys.stdin: print(line.strip() + '!', flush=True)"
    first, second = (forks.start(echo, stdin=PIPE, stdout=PIPE) for _ in range(2))
    for child in (first, second):
        child.stdin.write(b"so\n")
        assert child.stdout.readline() == b"so!\n"
        assert child.poll() is None
    with pytest.raises(TimeoutError):
        first.wait(0.01)
    first.stdin.close()  # held by nobody else
    assert first.wait(60) == 0 and first.stdout.read() == b""
    second.send_signal(signal.SIGSTOP)
    second.kill()
    assert second.wait(60) == -signal.SIGKILL
    for child in (first, second):
        child.end()
        child.kill()  # of one that has ended nothing is sent


def test_what_one_lacks_is_closed(tmp_path: Path) -> None:
    """But for what is passed on, under its own number."""
    fd = os.memfd_create("passed")
    os.write(fd, b"there")
    code = f"import os; print(os.pread({fd}, 9, 0), len(os.listdir('/proc/self/fd')))"
    out = tmp_path / "out"
    with out.open("w") as file:
        child = forks.start(code, stdout=file, pass_fds=[fd])
        assert child.wait(60) == 0
    os.close(fd)
    assert out.read_text() == "b'there' 5\n"


def test_the_first_one_asks_for_no_gpu(
    fresh_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """Behind that no child could use one. Nor has it imported what tests are about."""
    fresh_python(f"""
import sys, torch
asked = []
torch.cuda._is_compiled = lambda: True
torch._C._cuda_getDeviceCount = lambda: asked.append(1) or 0
sys.path.insert(0, {str(forks.HERE)!r})
import fork_parent
assert not asked and not torch.cuda.is_initialized()
assert not {{"jitkern", "tvm_ffi", "torch._dynamo"}} & {{*sys.modules}}
torch.cuda.is_available()
assert asked, "the test is not one"
""")
