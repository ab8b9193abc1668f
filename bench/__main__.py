"""Entry point of `python -m bench`; `jitkern bench` calls the same `main`."""

import sys

from bench.harness import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
