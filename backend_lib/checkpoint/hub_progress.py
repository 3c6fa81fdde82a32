"""How far a download is, in the log instead of a bar."""

from __future__ import annotations

import io
import logging
from typing import Any

from tqdm.auto import tqdm

from backend_lib.checkpoint.byte_words import bytes_of

log = logging.getLogger("tandem")

SECONDS_BETWEEN_LINES = 3.0


class LoggedProgress(tqdm):
    """What `huggingface_hub` takes for a bar. Of the several it makes, the one that counts received bytes is logged."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **(options | {"file": io.StringIO(), "mininterval": SECONDS_BETWEEN_LINES}))

    def display(self, *args: Any, **options: Any) -> None:
        if self.unit == "B" and self.n and str(self.desc).startswith("Download"):
            log.info("downloading: %s", bytes_of(self.n, self.total or self.n))
