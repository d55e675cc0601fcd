"""The parts of `benchmarks/overhead.py`."""
