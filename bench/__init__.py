"""Benchmarks of jitkern beside its peers: `python -m bench --help`."""
