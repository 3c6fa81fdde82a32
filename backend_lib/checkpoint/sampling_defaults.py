"""How a checkpoint's makers want it sampled, where a request does not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from backend_lib.checkpoint.fields import Fields

# By request field.
_HF_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
}
_GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """Attributes are named as the request's fields; None is what the checkpoint leaves open.

    As in vLLM, `do_sample` is not looked at: a request that does not say otherwise is sampled.
    """

    temperature: float | None = None
    top_k: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    @classmethod
    def from_generation_config(cls, fields: Fields) -> SamplingDefaults:
        """Raises ValueError naming what is not a number."""
        return cls._read(fields, _HF_KEYS)

    @classmethod
    def from_gguf(cls, fields: Fields) -> SamplingDefaults:
        """Raises ValueError naming what is not a number."""
        return cls._read(fields, _GGUF_KEYS)

    def given(self) -> dict[str, float]:
        """What the checkpoint says about drawing a token, by request field."""
        return {name: value for name, value in asdict(self).items() if value is not None and name != "max_tokens"}

    @classmethod
    def _read(cls, fields: Fields, keys: Mapping[str, str]) -> SamplingDefaults:
        values = {name: fields.optional_number(key) for name, key in keys.items() if name != "max_tokens"}
        has_length = "max_tokens" in keys and fields.values.get(keys["max_tokens"]) is not None
        return cls(**values, max_tokens=fields.whole(keys["max_tokens"]) if has_length else None)
