"""A checkpoint as its files describe it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gguf import GGUFReader
from tokenizers import Tokenizer

from backend_lib.checkpoint.decoder_config import DecoderConfig, HashConfig
from backend_lib.checkpoint.sampling_defaults import SamplingDefaults


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Where the tensors lie: safetensors shards, or one GGUF file that is open already, or nothing."""

    safetensors: tuple[Path, ...] = ()
    gguf: GGUFReader | None = None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Everything but the tensors.

    Attributes:
        name: what the user called it, without the folders before it.
        path: its file or folder.
        tokenizer: adds the special tokens (BOS) that the checkpoint asks for, unless told not to.
        eos_token_ids: any of these ends a sequence; empty when the checkpoint names none.
        chat_template: Jinja source, or None.
        tool_template: the one for conversations with tools, where it is another.
        bos_token: the text of the begin-of-sequence token, which chat templates may ask for; "" when there is none.
        eos_token: the same for end of sequence.
        sampling: what applies where a request does not say.
    """

    name: str
    config: DecoderConfig | HashConfig
    tokenizer: Tokenizer = field(repr=False)
    eos_token_ids: tuple[int, ...]
    chat_template: str | None = None
    tool_template: str | None = None
    path: Path = Path()
    bos_token: str = ""
    eos_token: str = ""
    sampling: SamplingDefaults = field(default=SamplingDefaults())
    weights: Weights = field(default=Weights(), repr=False)

    @property
    def context_length(self) -> int:
        """Tokens of prompt and output that a sequence may have."""
        return self.config.max_position
