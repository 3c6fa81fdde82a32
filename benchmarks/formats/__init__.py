"""The parts of `benchmarks/quality.py` and `benchmarks/products.py`."""
