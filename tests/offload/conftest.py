"""What the tests of shared pools have in common."""

from __future__ import annotations

from ranks import name, start  # noqa: F401
