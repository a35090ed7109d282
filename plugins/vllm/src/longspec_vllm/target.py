"""Check the target of a draft, and hand it to the draft."""

import json
from typing import Any

import vllm
from torch import nn
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from longspec_vllm import ARCHITECTURE, TESTED, is_tested
from longspec_vllm.clipped import BACKENDS, V1

logger = init_logger(f"vllm.{__name__}")  # vLLM shows only lines of its own loggers


def checked_target(vllm_config: VllmConfig, own: Any) -> Any:
    """Return the target's configuration, transformers' own. own: the draft's.

    Raises ValueError, with what to do, if the target, a server option or the draft does not fit.
    """
    if not is_tested():
        logger.warning("GLIDE: tested with vLLM %s, this is %s", ", ".join(TESTED), vllm.__version__)
    spec, parallel, cache = vllm_config.speculative_config, vllm_config.parallel_config, vllm_config.cache_config
    if spec is None or spec.method != "draft_model":
        use = {"method": "draft_model", "model": "<this folder>", "num_speculative_tokens": 4}
        raise ValueError(f"GLIDE: serve a target, with --speculative-config '{json.dumps(use)}'")
    of_target, own_parallel = spec.target_model_config, spec.draft_parallel_config
    refused = {
        f"Model Runner V2, which would show the draft what it must not see; {V1}": vllm_config.use_v2_model_runner,
        "a multimodal target; give one of text alone": of_target.is_multimodal_model,
        "--pipeline-parallel-size above 1; use --tensor-parallel-size": spec.target_parallel_config.pipeline_parallel_size > 1,
        "--decode-context-parallel-size above 1; leave it out": parallel.decode_context_parallel_size > 1,
        "--kv-sharing-fast-prefill; leave it out": cache.kv_sharing_fast_prefill,
        "draft_tensor_parallel_size other than --tensor-parallel-size; leave it out": (
            own_parallel.tensor_parallel_size != spec.target_parallel_config.tensor_parallel_size
        ),
        "kv_cache_dtype in --speculative-config; leave it out": spec.kv_cache_dtype is not None,
        # LoRA wraps embeddings and head for the batch of the target's tokens, and the draft uses the same ones.
        "--enable-lora; leave it out": vllm_config.lora_config is not None,
        # vLLM does not draft for a batch that contains a longer text.
        "a draft's folder of fewer positions than the target's; make it anew by `longspec export <draft> --layout vllm`": (
            spec.max_model_len is None and spec.draft_model_config.max_model_len < of_target.max_model_len
        ),
    }
    for what, there in refused.items():
        if there:
            raise ValueError(f"GLIDE: does not go with {what}")
    config = of_target.hf_text_config
    for name, value in own.glide["target"].items():
        found = getattr(config, name, value)
        if name == "rope_parameters":  # the server chooses how far they stretch, and so the number of positions
            name, value, found = "rope_theta", value.get("rope_theta"), found.get("rope_theta")
        if found != value and name != "max_position_embeddings":
            raise ValueError(f"GLIDE: {name}: the draft was made for a target of {value!r}, this one has {found!r}")
    return config


def last_attention(vllm_config: VllmConfig) -> Attention:
    """Return the target's last attention layer. Raises ValueError, with a layer's name, if its kind is not supported."""
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    for name, layer in layers.items():
        if type(layer) is not Attention or layer.kv_sharing_target_layer_name is not None:
            raise ValueError(f"GLIDE: {name}: is a {type(layer).__name__}; all of the target's layers must be plain attention")
        if layer.sliding_window is not None:
            raise ValueError(
                f"GLIDE: {name}: slides a window of {layer.sliding_window}; all of the target's layers must see the whole text"
            )
        if layer.attn_backend.get_name() not in BACKENDS:
            raise ValueError(
                f"GLIDE: attention backend {layer.attn_backend.get_name()} is not supported; start vLLM with "
                f"--attention-backend {BACKENDS[1]}"
            )
    *_, last = layers.values()  # in the order in which they were built
    return last


def check_dtypes(of_target: Attention, *own: Attention) -> None:
    """Raise ValueError if the draft's layers store or read the cache in another dtype than the target's last layer."""
    for layer in own:
        if layer.kv_cache_dtype != of_target.kv_cache_dtype:
            raise ValueError(
                f"GLIDE: {layer.layer_name}: its cache is {layer.kv_cache_dtype}, that of {of_target.layer_name} is "
                f"{of_target.kv_cache_dtype}; leave out --kv-cache-dtype-skip-layers"
            )


def _share(self: DraftModelProposer, target_language_model: nn.Module) -> None:
    """Give the draft its target. vLLM calls this after loading both; its own drafts of this method share nothing."""
    if self.speculative_config.draft_model_config.architecture == ARCHITECTURE:
        self.model.share(target_language_model)


DraftModelProposer._maybe_share_embeddings = _share
