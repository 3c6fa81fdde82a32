"""Checkpoints from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

# What `read_folder` and the weight loader read, and nothing else of what a repository may hold.
_WANTED = ("*.json", "*.jinja", "*.safetensors")
_UNWANTED = ("original/*", "consolidated*", "onnx/*")


def download(repo_id: str, revision: str | None = None) -> Path:
    """The local folder of a hub repository, downloaded unless it is in the hub's cache.

    Args:
        revision: a branch, tag or commit; None is the main branch.

    Raises:
        FileNotFoundError: the hub has no such repository, or cannot be reached.
    """
    # Here, so that a local model does not pay for them.
    from huggingface_hub import snapshot_download

    from backend_lib.checkpoint.hub_progress import LoggedProgress

    try:
        folder = snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
            tqdm_class=LoggedProgress,
        )
    except OSError as error:  # every network, permission and not-found error of the hub is one
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        named = f"{repo_id}@{revision}" if revision else repo_id
        raise FileNotFoundError(
            f"model '{named}' is not a local folder, and the hub does not give it: {reason}"
        ) from None
    return Path(folder)
