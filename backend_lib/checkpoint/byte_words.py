"""How far something of many bytes is, in words for the log."""


def bytes_of(done: int, total: int) -> str:
    """Such as "12 of 86 MB" or "2.0 of 4.1 GB"."""
    if total < 1e9:
        return f"{done / 1e6:.0f} of {total / 1e6:.0f} MB"
    return f"{done / 1e9:.1f} of {total / 1e9:.1f} GB"
