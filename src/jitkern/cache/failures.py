"""The last failed build of a key, so that many ranks report one failure instead of repeating it."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jitkern.errors import CompileError

# Ranks of one job start within seconds of each other; a person who tries again is slower.
FRESH_S = 10.0


@dataclass(frozen=True)
class FailureRecord:
    """The file that keeps one key's last failure."""

    path: Path

    def write(self, error: CompileError, inputs: str) -> None:
        """Record `error` for a build of `inputs` (a digest). Best effort: others then build too."""
        record = {
            "at_unix_s": time.time(),
            "inputs": inputs,
            "message": error.message,
            "command": error.command,
            "log": error.log,
            "source": error.source,
        }
        partial = self.path.with_name(f"{self.path.name}.{os.getpid()}.partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(record))
            os.replace(partial, self.path)
        except OSError:
            self._remove(partial)

    def recent(self, inputs: str, since_unix_s: float) -> CompileError | None:
        """Return the recorded failure of a build of the same `inputs`, if it is still fresh.

        Parameters
        ----------
        inputs
            Digest of what the build reads, as given to `write`.
        since_unix_s
            When the caller began to wait; a failure recorded later than 10 s before counts.
        """
        try:
            record = json.loads(self.path.read_bytes())
            if record["inputs"] != inputs or record["at_unix_s"] < since_unix_s - FRESH_S:
                return None
            return CompileError(
                str(record["message"]),
                command=str(record["command"]),
                log=str(record["log"]),
                source=record["source"],
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def forget(self) -> None:
        """Remove the record: the key has been built."""
        self._remove(self.path)

    @staticmethod
    def _remove(path: Path) -> None:
        with suppress(OSError):  # it grows stale by itself
            path.unlink(missing_ok=True)
