"""What the tests themselves rest on: nothing is left behind, and a change of a source is seen."""

from __future__ import annotations

import signal
from pathlib import Path

import forks
import proved
import pytest
from children import wait_until

KILLED = f"""
import os, sys, tempfile
sys.path.insert(0, {str(forks.HERE)!r})
from leftovers import temporary_folder
folder = temporary_folder()
left = tempfile.mkdtemp()
assert left.startswith(f"{{folder}}/") and os.environ["FAKE_NCCL_FOLDER"] == str(folder)
print(folder, flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["ended", "killed"])
def test_nothing_is_left_in_the_temporary_folder(how: str) -> None:
    done = forks.run(KILLED, how)
    assert done.returncode == (-signal.SIGKILL if how == "killed" else 0), done.stderr
    folder = Path(done.stdout.strip())
    assert folder.name.startswith("jitkern-tests-")
    wait_until(lambda: not folder.exists())


def test_a_test_is_proved_as_long_as_its_files_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proved, "ROOT", tmp_path)
    monkeypatch.setattr(proved, "FILE", tmp_path / "proved.json")
    monkeypatch.setattr(proved, "TEST_ALL", False)
    monkeypatch.setattr(proved, "_digests", {})
    source = tmp_path / "a.cc"
    source.write_text("1")
    assert not proved.is_proved("it", "*.cc")
    proved.FILE.write_text(f'{{"it": "{proved._digests["it"]}"}}')
    assert proved.is_proved("it", "*.cc")
    for file, text in ((source, "2"), (tmp_path / "b.cc", "")):  # changed, one more
        file.write_text(text)
        assert not proved.is_proved("it", "*.cc")
        source.write_text("1")
    (tmp_path / "b.cc").unlink()
    monkeypatch.setattr(proved, "TEST_ALL", True)
    assert not proved.is_proved("it", "*.cc")
    with pytest.raises(AssertionError, match="no such file"):
        proved.is_proved("it", "*.py")
