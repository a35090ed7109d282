"""Define what the two attentions see, by their own metadata builders next to those of the target's attention backend."""

from dataclasses import replace
from functools import cache
from typing import Any

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata, subclass_attention_backend

# With this runner a draft reads its lengths only from seq_lens, which is shortened here.
V1 = "set VLLM_USE_V2_MODEL_RUNNER=0 before you start vLLM"
UNKNOWN_RUNNER = f"GLIDE: this model runner has not handed the target over to the draft; {V1}"
BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")


def clipped(common: CommonAttentionMetadata, hidden: int) -> CommonAttentionMetadata:
    """Return metadata without the newest `hidden` tokens of each request; the queries stay.

    Causal attention aligns the last query with the last key, so each query then sees `hidden` tokens fewer.
    """
    upper = common.seq_lens_cpu_upper_bound
    return replace(
        common,
        # Rows that only pad a batch have no tokens.
        seq_lens=(common.seq_lens - hidden).clamp_min(0),
        max_seq_len=max(1, common.max_seq_len - hidden),
        seq_lens_cpu_upper_bound=None if upper is None else (upper - hidden).clamp_min(0),
        _num_computed_tokens_cache=None,
    )


@cache
def clipped_backend(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """Return a backend whose drafting metadata end at the last token that the target has verified."""

    class ClippedBuilder(backend.get_builder_cls()):  # type: ignore[misc]
        def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            # Built once at start, after target and draft are loaded.
            layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
            if not all(getattr(layer, "stands_beside_target", False) for layer in layers.values()):
                raise RuntimeError(UNKNOWN_RUNNER)

        def build_for_drafting(self, common_attn_metadata: CommonAttentionMetadata, draft_index: int) -> Any:
            # The first forward has the token that the target has just sampled, and each further one a drafted token more. The
            # target has no keys of these yet.
            return super().build_for_drafting(clipped(common_attn_metadata, draft_index + 1), draft_index)

    return subclass_attention_backend("GlideClipped", backend, ClippedBuilder)


@cache
def windowed_backend(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """Return the same backend under another name: vLLM makes one builder for all layers of a name, and assumes one window."""
    return subclass_attention_backend("GlideWindowed", backend, backend.get_builder_cls())
