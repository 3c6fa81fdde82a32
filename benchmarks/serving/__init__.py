"""The parts of `benchmarks/serve.py`: workload, load, client, figures, report."""
