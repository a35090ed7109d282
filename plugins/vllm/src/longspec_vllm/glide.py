"""The GLIDE draft layer (LongSpec, arXiv 2502.17421) as a vLLM model, for `"method": "draft_model"`.

Self attention has a window, and its own keys in blocks of the target's cache. Cross attention reads the keys and values of the
target's last layer; clipped.py hides those of tokens that the target has not verified yet. Embeddings and head are the target's
(target.py).

Shapes: T tokens, H hidden width.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.qwen2 import Qwen2MLP

from longspec_vllm import target
from longspec_vllm.clipped import clipped_backend, windowed_backend

# Published files hold keys and values of the cross attention, which the target's cache replaces.
UNUSED = ("cross_attn.k_proj.", "cross_attn.v_proj.")
# Tensors that vLLM stacks: part of vLLM's name -> parts of the published names, in order.
STACKED = {"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")}
# Factors of an fp8 cache: the target's layer stores with them what the cross attention reads.
SCALES = ("_k_scale", "_v_scale", "_k_scale_float", "_v_scale_float", "_k_scale_cpu", "_v_scale_cpu")


class WindowedAttention(Attention):
    """Attend with a window, with keys in blocks of layers without one, so that all layers share one block table."""

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        """Return the spec of a layer without a window."""
        window, self.sliding_window = self.sliding_window, None
        try:
            return super().get_kv_cache_spec(vllm_config)
        finally:
            self.sliding_window = window


class SelfAttention(nn.Module):
    """Attend causally to the draft's own keys: query i sees key j if 0 <= i - j <= window."""

    def __init__(
        self, config: Any, of_target: Attention, rope: nn.Module, window: int, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        width = of_target.head_size
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, width, config.num_attention_heads, config.num_key_value_heads, prefix=f"{prefix}.qkv_proj"
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * width, config.hidden_size, bias=False, prefix=f"{prefix}.o_proj"
        )
        self.rotary_emb = rope
        self.sizes = [of_target.num_heads * width, of_target.num_kv_heads * width, of_target.num_kv_heads * width]
        self.attn = WindowedAttention(
            of_target.num_heads,
            width,
            width**-0.5,
            num_kv_heads=of_target.num_kv_heads,
            cache_config=vllm_config.cache_config,
            per_layer_sliding_window=window + 1,  # vLLM counts the query itself
            attn_backend=windowed_backend(of_target.attn_backend),
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions_T: Tensor, hidden_TH: Tensor) -> Tensor:
        """Return the attention's output [T, H]; the keys and values of these tokens go into the cache."""
        query, key, value = self.qkv_proj(hidden_TH)[0].split(self.sizes, dim=-1)
        query, key = self.rotary_emb(positions_T, query, key)
        return self.o_proj(self.attn(query, key, value))[0]


class CrossAttention(nn.Module):
    """Attend to the keys and values of the target's last layer as they are cached: after norm and rotation."""

    def __init__(self, config: Any, of_target: Attention, rope: nn.Module, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        width = of_target.head_size
        queries = config.num_attention_heads * width
        self.q_proj = ColumnParallelLinear(config.hidden_size, queries, prefix=f"{prefix}.q_proj")
        self.o_proj = RowParallelLinear(queries, config.hidden_size, bias=False, prefix=f"{prefix}.o_proj")
        self.rotary_emb = rope
        self.attn = Attention(
            of_target.num_heads,
            width,
            width**-0.5,
            num_kv_heads=of_target.num_kv_heads,
            cache_config=vllm_config.cache_config,
            attn_backend=clipped_backend(of_target.attn_backend),
            kv_sharing_target_layer_name=of_target.layer_name,
            prefix=f"{prefix}.attn",
        )
        self.of_target = (of_target,)  # a tuple, so that it is no module of the draft's

    def take_scales(self) -> None:
        """Copy the target's cache scales. Only after the draft is loaded: loading sets its layers' scales to 1, in place."""
        for name in SCALES:
            setattr(self.attn, name, getattr(self.of_target[0], name))

    def forward(self, positions_T: Tensor, hidden_TH: Tensor) -> Tensor:
        """Return the attention's output [T, H]."""
        query = self.q_proj(hidden_TH)[0]
        query, _ = self.rotary_emb(positions_T, query, None)
        return self.o_proj(self.attn(query, None, None))[0]


class GlideForCausalLM(nn.Module):
    """Compute the draft, one decoder layer."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        """Build the layer next to the target that vLLM has already loaded. Raises ValueError for what it cannot serve."""
        super().__init__()
        own = vllm_config.model_config.hf_config
        config = target.checked_target(vllm_config, own)
        of_target = target.last_attention(vllm_config)
        # The target's own rotation, which server options may have stretched.
        rope = get_rope(of_target.head_size, config.max_position_embeddings, rope_parameters=config.rope_parameters)
        # vLLM reads a layer's number from its name. The target's numbers are all lower.
        place = f"{prefix or 'draft_model'}.layers.{config.num_hidden_layers}"
        self.self_attn = SelfAttention(config, of_target, rope, own.glide["window"], vllm_config, f"{place}.self_attn")
        self.cross_attn = CrossAttention(config, of_target, rope, vllm_config, f"{place}.cross_attn")
        target.check_dtypes(of_target, self.self_attn.attn, self.cross_attn.attn)
        self.mlp = Qwen2MLP(config.hidden_size, config.intermediate_size, config.hidden_act, prefix=f"{place}.mlp")
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps=eps)
        self.post_self_attention_layernorm = RMSNorm(width, eps=eps)
        self.post_cross_attention_layernorm = RMSNorm(width, eps=eps)
        self.final_layernorm = RMSNorm(width, eps=eps) if own.glide["final_norm"] else nn.Identity()
        self.config = own
        self._embed: Callable[[Tensor], Tensor]
        self._logits: Callable[[Tensor], Tensor | None]

    def share(self, target_model: Any) -> None:
        """Take embeddings, head and the cache's scales from the target, once both are loaded."""
        self._embed, self._logits = target_model.embed_input_ids, target_model.compute_logits
        self.cross_attn.take_scales()
        self.cross_attn.attn.stands_beside_target = True

    def embed_input_ids(self, input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the target's embeddings [T, H]."""
        return self._embed(input_ids)

    def forward(self, input_ids: Tensor, positions: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the hidden states [T, H] of tokens [T] at their positions [T]."""
        hidden_TH = self.embed_input_ids(input_ids)
        hidden_TH = hidden_TH + self.self_attn(positions, self.input_layernorm(hidden_TH))
        hidden_TH = hidden_TH + self.cross_attn(positions, self.post_self_attention_layernorm(hidden_TH))
        hidden_TH = hidden_TH + self.mlp(self.post_cross_attention_layernorm(hidden_TH))
        return self.final_layernorm(hidden_TH)

    def compute_logits(self, hidden_states: Tensor, *_: Any) -> Tensor | None:
        """Return the logits of the target's head."""
        return self._logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a draft's file; return the names of the filled parameters. vLLM refuses a file that leaves one unfilled."""
        parameters, loaded = dict(self.named_parameters()), set()
        for name, weight in weights:
            if name.startswith(UNUSED):
                continue
            own, shard = _place_of(name)
            if own not in parameters:
                raise ValueError(f"{name}: no tensor of a GLIDE draft with these settings; export the draft's folder again")
            parameter = parameters[own]
            if shard is None:
                getattr(parameter, "weight_loader", _fill)(parameter, weight)
            else:
                parameter.weight_loader(parameter, weight, shard)
            loaded.add(own)
        return loaded


def _fill(parameter: Tensor, weight: Tensor) -> None:
    if parameter.shape != weight.shape:
        raise ValueError(f"a norm's weight is {list(weight.shape)}, must be {list(parameter.shape)}")
    with torch.no_grad():
        parameter.copy_(weight)


def _place_of(name: str) -> tuple[str, str | int | None]:
    """Return vLLM's name of a published tensor, and which part of a stacked tensor it is; None: all of it."""
    for stacked, parts in STACKED.items():
        room = stacked.split(".")[0]
        for number, part in enumerate(parts):
            if name.startswith(f"{room}.{part}_proj."):
                return f"{stacked}.{name.rsplit('.', 1)[1]}", part if room == "self_attn" else number
    return name, None
