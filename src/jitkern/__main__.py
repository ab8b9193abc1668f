"""``python -m jitkern``: the command line."""

from __future__ import annotations

import sys

from jitkern.cli import main

sys.exit(main())
