"""Whole nights on a real server whose slowness was planted in its own process; see `benchmarks/real_night.py`."""
