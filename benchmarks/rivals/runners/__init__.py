"""Programs that run in the environments of other engines and answer `benchmarks/peers.py` over their pipes."""
