"""The example of a Docker image, without Docker: its instructions, run in folders.

Each stage is a folder that stands for its root: paths of COPY, RUN and ENV lead into it. `pip` and
`apt-get` are little programs that know what the file asks of them. The stages have no compiler but
after `apt-get install g++`, and the last one has no NVRTC either.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from needs import needs_cxx, needs_nvrtc
from paths import python_path
from processes import EXAMPLES, ROOT
from proved import unproved

DOCKERFILE = EXAMPLES / "docker" / "Dockerfile"
ARCHS = "8.0,9.0"
_PLACE = re.compile(r"(?<![\w./*])/(?=(?:app|kernels|src|wheels)\b)")

pytestmark = [
    needs_cxx,
    needs_nvrtc,
    unproved("docker", "examples/docker/*", "tests/examples/test_docker.py", "hatch_build.py"),
]

# `pip wheel` gives the wheel of this run's session, `pip install` unpacks it; what else an image
# needs of an index is there.
PIP = """\
import os, shutil, sys, zipfile
action, *words = sys.argv[1:]
if action == "wheel":
    source, *options = words
    assert os.path.isfile(source + "/pyproject.toml") and "--no-deps" in options, words
    target = options[options.index("-w") + 1]
    os.makedirs(target, exist_ok=True)
    shutil.copy(os.environ["TEST_WHEEL"], target)
elif action == "install":
    (wheel,) = [word for word in words if word.endswith(".whl")]
    zipfile.ZipFile(wheel).extractall(os.environ["PYTHONPATH"])
else:
    sys.exit("pip: " + action)
"""


def instructions() -> list[tuple[str, str]]:
    """Return (name, arguments) of each line that is no comment."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    return [
        (name, arguments)
        for name, _, arguments in (
            line.partition(" ") for line in lines if line[:1] not in ("", "#")
        )
    ]


@dataclass
class Stage:
    """A root, the programs in it, and its environment."""

    root: Path
    variables: dict[str, str] = field(default_factory=dict)
    has_compilers: bool = False

    def put_programs(self) -> None:
        programs = self.root / "programs"
        programs.mkdir()
        (programs / "pip.py").write_text(PIP)
        python = shlex.quote(sys.executable)
        pip = shlex.quote(str(programs / "pip.py"))
        lines = {
            "python": f'exec {python} "$@"',
            "jitkern": f'exec {python} -m jitkern "$@"',
            "pip": f'exec {python} {pip} "$@"',
            "apt-get": "true",
        }
        for name, line in lines.items():
            (programs / name).write_text(f"#!/bin/sh\n{line}\n")
            (programs / name).chmod(0o755)

    def inside(self, text: str) -> str:
        """Lead paths of the image into this root."""
        return _PLACE.sub(f"{self.root}/", text)

    def run(self, command: list[str], wheel: Path) -> subprocess.CompletedProcess[str]:
        env = {
            "PATH": str(self.root / "programs"),
            "HOME": str(self.root / "home"),
            "PYTHONPATH": str(self.root / "site"),
            "CUDA_VISIBLE_DEVICES": "",
            "TEST_WHEEL": str(wheel),
            "TMPDIR": str(self.root.parent),
        }
        if self.has_compilers:
            env["PATH"] += os.pathsep + os.environ["PATH"]
        else:
            env["CUDA_HOME"] = env["JITKERN_NVRTC"] = str(self.root / "nothing")
        return subprocess.run(
            [self.inside(word) for word in command],
            cwd=self.root,
            env={**env, **{name: self.inside(value) for name, value in self.variables.items()}},
            capture_output=True,
            text=True,
            timeout=300,
        )


def copy(stage: Stage, stages: dict[str, Stage], context: Path, arguments: str) -> None:
    words = arguments.split()
    origin = context
    if words[0].startswith("--from="):
        origin = stages[words.pop(0).removeprefix("--from=")].root
    source, target = origin / words[0].lstrip("/"), Path(stage.inside(words[1]))
    if source == context:
        target.symlink_to(ROOT)
    elif source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        target.parent.mkdir(exist_ok=True)
        shutil.copy(source, target)


def build(folder: Path, context: Path, wheel: Path, archs: str) -> tuple[Stage, list[str], str]:
    """Run all instructions; return the last stage, what it starts, and what all has printed."""
    stages: dict[str, Stage] = {}
    command: list[str] = []
    printed = ""
    for name, arguments in instructions():
        if name == "FROM":
            image, name_of_stage = re.fullmatch(r"(\S+) AS (\w+)", arguments).groups()  # type: ignore[union-attr]
            base = stages.get(image)
            stage = Stage(folder / name_of_stage)
            if base is None:
                assert re.fullmatch(r"python:3\.\d+-slim", image)
                stage.root.mkdir()
            else:
                shutil.copytree(base.root, stage.root, symlinks=True)
                shutil.rmtree(stage.root / "programs")
                stage.variables, stage.has_compilers = dict(base.variables), base.has_compilers
            stage.put_programs()
            stages[name_of_stage] = stage
        elif name == "ARG":
            stage.variables[arguments.partition("=")[0]] = archs
        elif name == "ENV":
            stage.variables.update(word.split("=", 1) for word in shlex.split(arguments))
        elif name == "COPY":
            copy(stage, stages, context, arguments)
        elif name == "RUN":
            stage.has_compilers |= arguments.startswith("apt-get") and "g++" in arguments
            done = stage.run(["/bin/sh", "-c", arguments], wheel)
            assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
            printed += done.stdout
        elif name == "CMD":
            command = json.loads(arguments)
        else:
            assert name == "USER" and arguments == "nobody"
    return stage, command, printed


def test_the_image_compiles_nothing(wheel: Path, tmp_path: Path) -> None:
    context = tmp_path / "context"
    context.mkdir()
    (context / "examples").symlink_to(EXAMPLES)
    (context / "bin").mkdir()
    for name, line in (
        ("docker", f'printf "%s\\n" "$@" > {shlex.quote(str(tmp_path / "docker.txt"))}'),
        ("python", f'exec {shlex.quote(sys.executable)} "$@"'),
    ):
        (context / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (context / "bin" / name).chmod(0o755)
    env = {**os.environ, "PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": ""}
    env["PATH"] = f"{context / 'bin'}{os.pathsep}{env['PATH']}"
    script = ["examples/docker/build.sh", ARCHS]
    done = subprocess.run(script, cwd=context, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    asked = (tmp_path / "docker.txt").read_text().split()
    assert asked[:3] == ["build", "-f", "examples/docker/Dockerfile"]
    assert f"ARCHS={ARCHS}" in asked and asked[-1] == "."

    stage, command, printed = build(tmp_path, context, wheel, ARCHS)
    for arch in ARCHS.split(","):
        assert re.search(
            rf"^dequantise +576, 256, 4, true +{arch} +compiled", printed, re.MULTILINE
        )
    assert "missing" not in printed
    done = stage.run(command, wheel)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("1000 rows of 576 on cpu: equal\n")
    assert not (stage.root / "home").exists()  # nothing was written, to no cache

    # A kernel that was edited after the record was made is not in the image.
    kernel = stage.root / "app" / "kernel.cc"
    kernel.write_text(kernel.read_text() + "// edited\n")
    done = stage.run(command, wheel)
    assert done.returncode == 1
    assert "FrozenError: " in done.stderr and "dequantise" in done.stderr


def test_there_is_every_instruction_that_it_is_about() -> None:
    text = "\n".join(f"{name} {arguments}" for name, arguments in instructions())
    wanted = ("warm --replay", "warm --element-size", "cache export", "cache verify")
    assert all(f"jitkern {words}" in text for words in wanted)
    assert "ENV JITKERN_CACHE_PATH=/kernels JITKERN_FREEZE=1" in text
