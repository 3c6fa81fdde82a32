"""The parts of `benchmarks/kills.py` and `benchmarks/soak.py`."""
