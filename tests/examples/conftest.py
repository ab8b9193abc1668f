"""Tests import examples by their names."""

import sys

from processes import EXAMPLES

sys.path.append(str(EXAMPLES))
