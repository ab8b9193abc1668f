"""Benchmarks: what a case is, how it is timed and counted, and the guard that runs in CI.

``jitkern bench --ci`` measures each case as a ratio to something else in the same process, and
compares with a baseline that knows how far each ratio strays. The benchmarks beside every peer,
which need a source checkout, are built of the same parts.
"""

from jitkern.bench.case import Case, CaseError, CaseFunction, Context, Impl, Row, case

__all__ = ["Case", "CaseError", "CaseFunction", "Context", "Impl", "Row", "case"]
