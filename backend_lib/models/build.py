"""A decoder put together from its configuration and tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from backend_lib.checkpoint import DecoderConfig, ExpertsConfig, LayerConfig, RopeConfig
from backend_lib.models.batch import ForwardBatch
from backend_lib.models.decoder import Attention, HeadNorm, Layer, RMSNorm, Scores, Step, TransformerDecoder
from backend_lib.models.linear import DenseHead, Embedding, Linear, is_quantised, make_embedding, make_linear
from backend_lib.models.memory import give_back_free_memory
from backend_lib.models.mlp import MLP, GatedMLP, MixtureOfExperts, StackedExperts
from backend_lib.models.placement import Placement
from backend_lib.models.rope import Rope
from backend_lib.models.weights import TensorSource


class DecoderBuilder:
    """Reads tensors in the order of the layers, fuses what shares an input, and keeps them in the format asked for.

    Tensors go by GGUF's names, which are the same for all families.
    """

    def __init__(
        self, config: DecoderConfig, tensors: TensorSource, placement: Placement,
        start_step: Callable[[ForwardBatch], Step], max_position: int,
    ) -> None:  # fmt: skip
        self.config = config
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
            self.config, embedding=embedding, layers=layers, norm=norm, head=head,
            start_step=self.start_step, kv_type=self.placement.dtype, device=self.placement.device,
        )  # fmt: skip

    def _embedding_and_head(self) -> tuple[Callable[[torch.Tensor], torch.Tensor], Linear]:
        """The two largest tensors, together, so that the float32 original is gone before the layers are read."""
        vocab_size, hidden_size = self.config.vocab_size, self.config.hidden_size
        if not self.config.tie_word_embeddings:
            head = self._outer("output", vocab_size, hidden_size)
            return self._embedding(vocab_size, hidden_size), head
        weight = self._read("token_embd.weight", (vocab_size, hidden_size), self.placement.dtype)
        if self.weights == "dense":
            return Embedding(weight), DenseHead(weight, None)
        if is_quantised(self.weights, hidden_size):
            both = make_linear(weight, None, self.outer_weights)
            return make_embedding(both), both
        embedding = Embedding(weight.to(self.embedding_type))
        return embedding, make_linear(weight, None, self.weights)

    def _embedding(self, vocab_size: int, hidden_size: int) -> Callable[[torch.Tensor], torch.Tensor]:
        if is_quantised(self.weights, hidden_size):
            return make_embedding(self._outer("token_embd", vocab_size, hidden_size))
        return Embedding(self._read("token_embd.weight", (vocab_size, hidden_size), dtype=self.embedding_type))

    def _layer(self, name: str, layer: LayerConfig) -> Layer:
        has_post_norms = self.config.post_norms
        return Layer(
            attention_norm=self._norm(f"{name}.attn_norm"),
            attention=self._attention(name, layer),
            attention_post_norm=self._norm(f"{name}.post_attention_norm") if has_post_norms else None,
            mlp_norm=self._norm(f"{name}.ffn_norm"),
            mlp=self._mlp(name, layer),
            mlp_post_norm=self._norm(f"{name}.post_ffw_norm") if has_post_norms else None,
        )

    def _attention(self, name: str, layer: LayerConfig) -> Attention:
        config = self.config
        query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = ["attn_qkv"] if config.fused_projections else ["attn_q", "attn_k", "attn_v"]
        sizes = [query + 2 * key_value] if config.fused_projections else [query, key_value, key_value]
        names = [f"{name}.{part}" for part in parts]
        return Attention(
            qkv=self._linear(names, sizes, config.hidden_size, bias=config.qkv_bias),
            output=self._linear(
                [f"{name}.attn_output"], [config.hidden_size], query, bias=config.attention_output_bias
            ),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scores=Scores(config.attention_scale or config.head_dim**-0.5, config.attention_softcap),
            rope=self.ropes.get(layer.rope),
            window=layer.window,
            head_norm=self._head_norm(name) if config.head_norms else None,
        )

    def _mlp(self, name: str, layer: LayerConfig) -> MLP:
        config = self.config
        if layer.has_experts:
            assert config.experts is not None
            return self._mixture(name, config.experts)
        inner, hidden, bias = config.intermediate_size, config.hidden_size, config.mlp_bias
        parts = ["ffn_up"] if config.fused_projections else ["ffn_gate", "ffn_up"]
        sizes = [2 * inner] if config.fused_projections else [inner, inner]
        return GatedMLP(
            gate_up=self._linear([f"{name}.{part}" for part in parts], sizes, hidden, bias=bias),
            down=self._linear([f"{name}.ffn_down"], [hidden], inner, bias=bias),
            activation=self.config.activation,
        )

    def _mixture(self, name: str, experts: ExpertsConfig) -> MixtureOfExperts:
        inner = experts.intermediate_size
        return MixtureOfExperts(
            router=self._read(f"{name}.ffn_gate_inp.weight", (experts.count, self.config.hidden_size)),
            experts=self._stacked(name, experts)
            if self.weights == "dense"
            else [self._expert(name, expert, inner) for expert in range(experts.count)],
            used=experts.used,
            renormalised=experts.renormalised,
        )

    def _expert(self, name: str, expert: int, inner: int) -> GatedMLP:
        hidden = self.config.hidden_size
        parts = [f"{name}.ffn_{part}_exps" for part in ("gate", "up")]
        return GatedMLP(
            gate_up=self._linear(parts, [inner, inner], hidden, bias=False, expert=expert),
            down=self._linear([f"{name}.ffn_down_exps"], [hidden], inner, bias=False, expert=expert),
            activation=self.config.activation,
        )

    def _stacked(self, name: str, experts: ExpertsConfig) -> StackedExperts:
        inner, hidden, dtype = experts.intermediate_size, self.config.hidden_size, self.placement.dtype
        names = [f"{name}.ffn_{part}_exps.weight" for part in ("gate", "up", "down")]
        for each, shape in zip(names, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True):
            self.tensors.check(each, shape, expert=0)
        gate_up = self._empty((experts.count, 2 * inner, hidden), dtype)
        down = self._empty((experts.count, hidden, inner), dtype)
        for expert in range(experts.count):
            parts = (*gate_up[expert].chunk(2), down[expert])
            for part, each in zip(parts, names, strict=True):
                self.tensors.read_into(part, each, expert)
        return StackedExperts(gate_up, down, self.config.activation)

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(weight=self._norm_weight(name, self.config.hidden_size), eps=self.config.rms_norm_eps)

    def _head_norm(self, name: str) -> HeadNorm:
        config = self.config
        query, key = (self._norm_weight(f"{name}.attn_{each}_norm", config.head_dim) for each in "qk")
        weight = torch.cat([query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)])
        return HeadNorm(weight=weight, eps=config.rms_norm_eps)

    def _norm_weight(self, name: str, size: int) -> torch.Tensor:
        return self._read(f"{name}.weight", (size,)) + self.config.norm_offset

    def _outer(self, name: str, vocab_size: int, hidden_size: int) -> Linear:
        """Embedding or head."""
        weight = self._read(f"{name}.weight", (vocab_size, hidden_size), self.placement.dtype)
        return DenseHead(weight, None) if self.weights == "dense" else make_linear(weight, None, self.outer_weights)

    def _linear(
        self, names: list[str], out_sizes: list[int], in_size: int, *, bias: bool, expert: int | None = None
    ) -> Linear:
        """One layer that computes all of `names`, their outputs side by side."""
        for name, size in zip(names, out_sizes, strict=True):
            self.tensors.check(f"{name}.weight", (size, in_size), expert)
        weight = self._empty((sum(out_sizes), in_size), self.placement.dtype)
        for name, part in zip(names, weight.split(out_sizes), strict=True):
            self.tensors.read_into(part, f"{name}.weight", expert)
        biases = self._empty((sum(out_sizes),), self.placement.dtype) if bias else None
        for name, part in zip(names, biases.split(out_sizes) if biases is not None else (), strict=False):
            self.tensors.read_into(part, f"{name}.bias")
        return make_linear(weight, biases, self.weights)

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        self.tensors.check(name, shape)
        tensor = self._empty(shape, dtype)
        self.tensors.read_into(tensor, name)
        return tensor

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.placement.device)
