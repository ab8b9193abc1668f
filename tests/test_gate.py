"""Forks while another thread imports or compiles: the child works or raises, and never hangs."""

from __future__ import annotations

import os
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from children import wait_until
from paths import python_path

from jitkern import gate as module
from jitkern.gate import gate

Fresh = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork with threads, 3.12
        yield


def status_of(in_child: Callable[[], object]) -> int:
    """Fork; return the exit status of the child, which calls `in_child`: 3 if that raises."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(int(bool(in_child())))
        except RuntimeError:
            os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork_waits_for_threads_inside_and_not_for_its_own() -> None:
    leaves, entered = threading.Event(), threading.Event()

    def compile_for_a_while() -> None:
        with gate:
            entered.set()
            wait_until(lambda: gate._forking)
            leaves.set()

    thread = threading.Thread(target=compile_for_a_while)
    thread.start()
    entered.wait()

    def enters() -> bool:
        with gate, gate:
            return leaves.is_set()

    with gate:
        assert status_of(enters) == 1
    thread.join()


def test_a_child_that_cannot_work_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other thread took longer than a fork waits."""
    monkeypatch.setattr(module, "_FORK_WAIT_S", 0.01)
    ends, entered = threading.Event(), threading.Event()

    def hang() -> None:
        with gate:
            entered.set()
            ends.wait()

    thread = threading.Thread(target=hang)
    thread.start()
    entered.wait()
    assert status_of(gate.__enter__) == 3
    ends.set()
    thread.join()
    assert status_of(lambda: True) == 1


OTHERS = """
import os, threading, time
late = threading.Event()
os.register_at_fork(before=lambda: late.wait(0.3))  # runs after the gate's, and lets threads run
from jitkern.gate import gate
entered = []
def enter():
    while not gate._forking:
        time.sleep(0.001)
    with gate:
        entered.append(1)
thread = threading.Thread(target=enter)
thread.start()
child = os.fork()
if child == 0:
    os._exit(len(entered))
thread.join(10)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), entered)
"""


def test_no_thread_enters_while_hooks_of_others_run(forked_python: Fresh) -> None:
    assert forked_python(OTHERS).stdout == "0 [1]\n"


IMPORTS = """
import os, signal, sys, threading, time
import jitkern
jitkern._HOME["late"] = "late_module"
thread = threading.Thread(target=lambda: jitkern.late)
thread.start()
while "late_module" not in sys.modules:
    time.sleep(0.001)
child = os.fork()
if child == 0:
    signal.alarm(10)  # it hung in the import
    os._exit(jitkern.late)
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_while_a_first_call_imports(forked_python: Fresh, tmp_path: Path) -> None:
    (tmp_path / "late_module.py").write_text("import time\ntime.sleep(0.5)\nlate = 7\n")
    env = {"PYTHONPATH": python_path(tmp_path)}
    assert forked_python(IMPORTS, env=env).stdout == "7\n"
