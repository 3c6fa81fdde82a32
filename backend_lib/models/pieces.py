"""Which parts of which tensors a rank's share of a decoder is made of. Names are GGUF's."""

from __future__ import annotations

from typing import NamedTuple

from backend_lib.models.division import Share, scaled
from backend_lib.models.shapes import Part


class Piece(NamedTuple):
    """Outputs of a linear layer, and the inputs that the rank has. `name` is without `.weight` or `.bias`."""

    name: str
    part: Part

    @property
    def is_summed(self) -> bool:
        """Each rank computes all outputs from some of the inputs, and they are added up."""
        return self.part.columns is not None

    def bias(self, rank: int) -> Part:
        """The part of its bias: a sum over ranks takes it from rank 0, and nothing of it from the others."""
        return Part(self.part.shape[:1], range(0) if self.is_summed and rank else self.part.rows)


class Pieces:
    """Of one rank's share. What is named is `blk.3`, a layer."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._config = share.whole

    def vocabulary(self) -> Part:
        """Of embedding and head."""
        return Part((self._config.vocab_size, self._config.hidden_size), self._share.vocabulary)

    def qkv(self, layer: str) -> list[Piece]:
        config, share = self._config, self._share
        counts = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        wanted = [share.query_heads, share.kv_heads, share.kv_heads]
        names = ["attn_qkv"] if config.fused_projections else ["attn_q", "attn_k", "attn_v"]
        return self._outputs(layer, names, counts, wanted, config.head_dim)

    def attention_output(self, layer: str) -> Piece:
        config = self._config
        return self._summed(f"{layer}.attn_output", config.num_heads, self._share.query_heads, config.head_dim)

    def gate_up(self, layer: str) -> list[Piece]:
        names = ["ffn_up"] if self._config.fused_projections else ["ffn_gate", "ffn_up"]
        return self._outputs(layer, names, [self._config.intermediate_size] * 2, [self._share.inner] * 2)

    def down(self, layer: str) -> Piece:
        return self._summed(f"{layer}.ffn_down", self._config.intermediate_size, self._share.inner)

    def expert(self, layer: str) -> tuple[Piece, Piece, Piece]:
        """Gate, up and down, the same of every expert."""
        assert self._config.experts is not None
        inner, wanted = self._config.experts.intermediate_size, self._share.expert_inner
        gate, up = self._outputs(layer, ["ffn_gate_exps", "ffn_up_exps"], [inner] * 2, [wanted] * 2)
        return gate, up, self._summed(f"{layer}.ffn_down_exps", inner, wanted)

    def _outputs(
        self, layer: str, names: list[str], counts: list[int], wanted: list[range], size: int = 1
    ) -> list[Piece]:
        """Some outputs of several matrices, each a tensor or all in one. What is counted has `size` outputs."""
        hidden = self._config.hidden_size
        is_fused = len(names) < len(counts)
        pieces = []
        for place, (count, rows) in enumerate(zip(counts, wanted, strict=True)):
            before, outputs = (sum(counts[:place]), sum(counts)) if is_fused else (0, count)
            part = Part((outputs * size, hidden), scaled(range(before + rows.start, before + rows.stop), size))
            pieces.append(Piece(f"{layer}.{names[0 if is_fused else place]}", part))
        return pieces

    def _summed(self, name: str, count: int, wanted: range, size: int = 1) -> Piece:
        """All outputs of a matrix. What is counted has `size` inputs."""
        hidden = self._config.hidden_size
        columns = None if len(wanted) == count else scaled(wanted, size)
        return Piece(name, Part((hidden, count * size), range(hidden), columns))
