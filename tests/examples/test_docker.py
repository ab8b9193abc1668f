"""The example of a Docker image, without Docker: its commands, files and variables are there.

tests/test_warm.py runs such commands: it builds a record into a folder that frozen processes use.
"""

from __future__ import annotations

import re

from processes import EXAMPLES, ROOT

from jitkern.cli import _parser
from jitkern.env import VARIABLES

TEXT = (EXAMPLES / "docker" / "Dockerfile").read_text()


def test_commands_files_and_variables_are_there() -> None:
    commands = re.findall(r"^RUN jitkern (.+)$", TEXT, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        _parser().parse_args(command.replace("$ARCHS", "9.0").split())
    for folder in re.findall(r"^COPY (examples/\S+)", TEXT, re.MULTILINE):
        assert (ROOT / folder).is_dir()
    (variables,) = re.findall(r"^ENV (.+)$", TEXT, re.MULTILINE)
    assert {name.partition("=")[0] for name in variables.split()} <= set(VARIABLES)
