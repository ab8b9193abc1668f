"""Entry point of `python -m bench`."""

import sys

from bench.harness import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
