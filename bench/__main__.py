"""Entry point of `python -m bench`."""

from bench.harness import main

if __name__ == "__main__":
    raise SystemExit(main())
