"""What all tests share."""

from __future__ import annotations

import os

from hypothesis import settings

# In CI the same examples every time: what new random ones find belongs to a developer's run, not to whoever lands next.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
