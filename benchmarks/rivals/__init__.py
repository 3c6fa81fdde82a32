"""The parts of `benchmarks/peers.py`: other engines, how they are installed and asked, figures, floors, report."""
