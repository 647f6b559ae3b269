"""Measurements, run by hand from the root of the repository: `python -m benchmarks.NAME`. Results: docs/benchmarks."""
