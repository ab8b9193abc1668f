"""``python -m jitkern``: the command line."""

import sys

from jitkern.cli import main

sys.exit(main())
