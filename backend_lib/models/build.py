"""A decoder put together from its configuration and tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from backend_lib.checkpoint import ExpertsConfig, LayerConfig, RopeConfig
from backend_lib.models.batch import ForwardBatch
from backend_lib.models.decoder import Attention, HeadNorm, Layer, RMSNorm, Scores, Step, TransformerDecoder
from backend_lib.models.division import Share
from backend_lib.models.linear import DenseHead, Embedding, Linear, is_quantised, make_embedding, make_linear
from backend_lib.models.memory import give_back_free_memory
from backend_lib.models.mlp import MLP, GatedMLP, MixtureOfExperts, StackedExperts
from backend_lib.models.parallel import ALONE, Ranks
from backend_lib.models.pieces import Piece, Pieces
from backend_lib.models.placement import Placement
from backend_lib.models.rope import Rope
from backend_lib.models.weights import TensorSource


class DecoderBuilder:
    """Reads tensors in the order of the layers, fuses what shares an input, and keeps them in the format asked for.

    Of matrices it reads the `share` of one of the `ranks`. Tensors go by GGUF's names, which are the same for all
    families.
    """

    def __init__(
        self, share: Share, tensors: TensorSource, placement: Placement,
        start_step: Callable[[ForwardBatch], Step], max_position: int, ranks: Ranks = ALONE,
    ) -> None:  # fmt: skip
        self.config = config = share.whole
        self.share = share
        self.pieces = Pieces(share)
        self.ranks = ranks
        self.start_step = start_step
        self.tensors = tensors
        self.placement = placement
        self.weights = weights = placement.weights
        # What goes in and what comes out of a model suffers most from 4 bits.
        self.outer_weights = "int8" if weights == "int4" else weights
        self.embedding_type = placement.dtype if weights in ("fp32", "dense") else torch.float16
        ropes = {layer.rope for layer in config.layers if layer.rope}
        self.ropes: dict[RopeConfig | None, Rope] = {rope: Rope(rope, max_position, placement.device) for rope in ropes}

    def decoder(self) -> TransformerDecoder:
        """Raises ValueError naming a tensor that is missing, of the wrong shape, or not of this architecture."""
        embedding, head = self._embedding_and_head()
        layers = []
        for i, layer in enumerate(self.config.layers):
            layers.append(self._layer(f"blk.{i}", layer))
            give_back_free_memory()
        norm = self._norm("output_norm")
        self.tensors.check_all_read()
        give_back_free_memory()
        return TransformerDecoder(
            self.share, self.ranks, embedding=embedding, layers=layers, norm=norm, head=head,
            start_step=self.start_step, kv_type=self.placement.dtype, device=self.placement.device,
        )  # fmt: skip

    def _embedding_and_head(self) -> tuple[Callable[[torch.Tensor], torch.Tensor], Linear]:
        """The two largest tensors, together, so that the float32 original is gone before the layers are read."""
        if not self.config.tie_word_embeddings:
            head = self._outer("output")
            return self._embedding(), head
        weight = self._vocabulary_rows("token_embd", self.placement.dtype)
        if self.weights == "dense":
            return Embedding(weight), DenseHead(weight, None)
        if is_quantised(self.weights, self.config.hidden_size):
            both = make_linear(weight, None, self.outer_weights)
            return make_embedding(both), both
        embedding = Embedding(weight.to(self.embedding_type))
        return embedding, make_linear(weight, None, self.weights)

    def _embedding(self) -> Callable[[torch.Tensor], torch.Tensor]:
        if is_quantised(self.weights, self.config.hidden_size):
            return make_embedding(self._outer("token_embd"))
        return Embedding(self._vocabulary_rows("token_embd", self.embedding_type))

    def _outer(self, name: str) -> Linear:
        """Embedding or head."""
        weight = self._vocabulary_rows(name, self.placement.dtype)
        return DenseHead(weight, None) if self.weights == "dense" else make_linear(weight, None, self.outer_weights)

    def _vocabulary_rows(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """As many on every rank, the last ones zero where there are none left."""
        part = self.pieces.vocabulary()
        self.tensors.check(f"{name}.weight", part.shape)
        weight = self._empty((self.share.config.vocab_size, self.config.hidden_size), dtype)
        self.tensors.read_into(weight[: len(part.rows)], f"{name}.weight", part=part)
        weight[len(part.rows) :] = 0
        return weight

    def _layer(self, name: str, layer: LayerConfig) -> Layer:
        has_post_norms = self.config.post_norms
        return Layer(
            attention_norm=self._norm(f"{name}.attn_norm"),
            attention=self._attention(name, layer),
            attention_post_norm=self._norm(f"{name}.post_attention_norm") if has_post_norms else None,
            mlp_norm=self._norm(f"{name}.ffn_norm"),
            mlp=self._mlp(name, layer),
            mlp_post_norm=self._norm(f"{name}.post_ffw_norm") if has_post_norms else None,
            ranks=self.ranks,
        )

    def _attention(self, name: str, layer: LayerConfig) -> Attention:
        config, own = self.config, self.share.config
        return Attention(
            qkv=self._linear(self.pieces.qkv(name), bias=config.qkv_bias),
            output=self._linear([self.pieces.attention_output(name)], bias=config.attention_output_bias),
            num_heads=own.num_heads,
            num_kv_heads=own.num_kv_heads,
            head_dim=config.head_dim,
            scores=Scores(config.attention_scale or config.head_dim**-0.5, config.attention_softcap),
            rope=self.ropes.get(layer.rope),
            window=layer.window,
            head_norm=self._head_norm(name) if config.head_norms else None,
        )

    def _mlp(self, name: str, layer: LayerConfig) -> MLP:
        config, pieces = self.config, self.pieces
        if layer.has_experts:
            assert config.experts is not None
            return self._mixture(name, config.experts)
        return GatedMLP(
            gate_up=self._linear(pieces.gate_up(name), bias=config.mlp_bias),
            down=self._linear([pieces.down(name)], bias=config.mlp_bias),
            activation=config.activation,
        )

    def _mixture(self, name: str, experts: ExpertsConfig) -> MixtureOfExperts:
        return MixtureOfExperts(
            router=self._read(f"{name}.ffn_gate_inp.weight", (experts.count, self.config.hidden_size)),
            experts=self._stacked(name, experts.count)
            if self.weights == "dense"
            else [self._expert(name, expert) for expert in range(experts.count)],
            used=experts.used,
            renormalised=experts.renormalised,
        )

    def _expert(self, name: str, expert: int) -> GatedMLP:
        gate, up, down = self.pieces.expert(name)
        return GatedMLP(
            gate_up=self._linear([gate, up], bias=False, expert=expert),
            down=self._linear([down], bias=False, expert=expert),
            activation=self.config.activation,
        )

    def _stacked(self, name: str, count: int) -> StackedExperts:
        hidden, inner, dtype = self.config.hidden_size, len(self.share.expert_inner), self.placement.dtype
        pieces = self.pieces.expert(name)
        for piece in pieces:
            self.tensors.check(f"{piece.name}.weight", piece.part.shape, expert=0)
        gate_up = self._empty((count, 2 * inner, hidden), dtype)
        down = self._empty((count, hidden, inner), dtype)
        for expert in range(count):
            parts = (*gate_up[expert].chunk(2), down[expert])
            for out, piece in zip(parts, pieces, strict=True):
                self.tensors.read_into(out, f"{piece.name}.weight", expert, piece.part)
        return StackedExperts(gate_up, down, self.config.activation)

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(weight=self._norm_weight(name, self.config.hidden_size), eps=self.config.rms_norm_eps)

    def _head_norm(self, name: str) -> HeadNorm:
        own = self.share.config
        query, key = (self._norm_weight(f"{name}.attn_{each}_norm", own.head_dim) for each in "qk")
        weight = torch.cat([query.expand(own.num_heads, -1), key.expand(own.num_kv_heads, -1)])
        return HeadNorm(weight=weight, eps=own.rms_norm_eps)

    def _norm_weight(self, name: str, size: int) -> torch.Tensor:
        return self._read(f"{name}.weight", (size,)) + self.config.norm_offset

    def _linear(self, pieces: Sequence[Piece], *, bias: bool, expert: int | None = None) -> Linear:
        """One layer that computes all of them, their outputs side by side."""
        for piece in pieces:
            self.tensors.check(f"{piece.name}.weight", piece.part.shape, expert)
        sizes = [piece.part.size for piece in pieces]
        weight = self._empty((sum(rows for rows, _ in sizes), sizes[0][1]), self.placement.dtype)
        for piece, out in zip(pieces, weight.split([rows for rows, _ in sizes]), strict=True):
            self.tensors.read_into(out, f"{piece.name}.weight", expert, piece.part)
        return make_linear(weight, self._bias(pieces) if bias else None, self.weights)

    def _bias(self, pieces: Sequence[Piece]) -> torch.Tensor | None:
        """Where this rank has none, nothing is read of it, which the tensors take note of."""
        parts = [piece.bias(self.ranks.rank) for piece in pieces]
        bias = self._empty((sum(len(part.rows) for part in parts),), self.placement.dtype)
        for piece, part, out in zip(pieces, parts, bias.split([len(part.rows) for part in parts]), strict=True):
            self.tensors.read_into(out, f"{piece.name}.bias", part=part)
        return bias if len(bias) else None

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        self.tensors.check(name, shape)
        tensor = self._empty(shape, dtype)
        self.tensors.read_into(tensor, name)
        return tensor

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.placement.device)
