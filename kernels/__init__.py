import os

# One multiplication and one addition may become one rounding. Triton's default differs between versions.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
