"""The Triton model of Tandem: it finds the package and hands over to the router."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("backend_lib") is None:
    # A model repository inside a checkout needs no installation: the package is three folders up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from backend_lib.router.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
