"""Bytes in messages for people."""


def size_text(size_bytes: int) -> str:
    """Return bytes in the unit that suits them: ``3.20 GiB``."""
    if size_bytes < 2**20:
        return f"{size_bytes} B"
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.2f} MiB"
