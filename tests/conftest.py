"""What all tests share."""

from __future__ import annotations

import os

# Triton's kernels run on CPU tensors, in its interpreter. Said before anything imports Triton, which reads it once.
# Processes that compile kernels are started without it.
os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Iterator

import pytest
from hypothesis import settings

# In CI the same examples every time: what new random ones find belongs to a developer's run, not to whoever lands next.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch's threads gain nothing on small models, and collapse when a server or another process wants the cores."""
    import torch  # most tests need none

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
