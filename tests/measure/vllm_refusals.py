"""What the plugin for vLLM says of what it cannot serve, as JSON: a program for test_vllm_glide.py in vLLM's environment."""

import json
import logging
from types import SimpleNamespace
from typing import Any

import longspec_vllm
import torch
import vllm
from longspec_vllm import target
from longspec_vllm.clipped import clipped_backend
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.sample import rejection_sampler

SHAPE = {"hidden_size": 128, "vocab_size": 512}
ROPE = {"rope_type": "default", "rope_theta": 1e4}


def config(**changed: Any) -> Any:
    """A server's configuration, as far as the plugin looks at it."""
    given = {"v2": False, "multimodal": False, "pipeline": 1, "context": 1, "fast": False, "draft_tp": 2, "cache": None}
    given |= {"lora": None, "positions": 64, "given_positions": None}
    given |= {"method": "draft_model", "target": SHAPE} | changed
    of_target = SimpleNamespace(is_multimodal_model=given["multimodal"], hf_text_config=SimpleNamespace(**given["target"]))
    of_target.max_model_len = 64
    spec = SimpleNamespace(
        method=given["method"],
        target_model_config=of_target,
        target_parallel_config=SimpleNamespace(pipeline_parallel_size=given["pipeline"], tensor_parallel_size=2),
        draft_parallel_config=SimpleNamespace(tensor_parallel_size=given["draft_tp"]),
        kv_cache_dtype=given["cache"],
        draft_model_config=SimpleNamespace(max_model_len=given["positions"]),
        max_model_len=given["given_positions"],
    )
    return SimpleNamespace(
        speculative_config=spec,
        parallel_config=SimpleNamespace(decode_context_parallel_size=given["context"]),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=given["fast"]),
        use_v2_model_runner=given["v2"],
        lora_config=given["lora"],
    )


def layers(*windows: int | None, backend: str = "CPU_ATTN", kind: type = Attention) -> Any:
    """A server's configuration with layers of these windows."""
    built = {}
    for number, window in enumerate(windows):
        layer = kind.__new__(kind)
        layer.__dict__ |= {"kv_sharing_target_layer_name": None, "sliding_window": window}
        layer.__dict__["attn_backend"] = SimpleNamespace(get_name=lambda: backend)
        built[f"model.layers.{number}.self_attn.attn"] = layer
    return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=built))


def said(call: Any, *arguments: Any) -> str:
    """The error, or nothing."""
    try:
        call(*arguments)
    except ValueError as error:
        return str(error)
    return ""


def drafting_lengths(backend: type, **attributes: Any) -> list[list[int]]:
    """The lengths that a backend's own builder reads in the first three forwards of drafting, of three texts, and the longest.

    What the target has just sampled, and what is drafted, stands in the lengths that it is given.
    """
    builder_class = clipped_backend(backend).get_builder_cls()
    builder = builder_class.__new__(builder_class)
    builder.__dict__ |= {"rswa_window": None} | attributes
    found = []
    for index in range(3):
        lengths = torch.tensor([300 + index, 2 + index, 0], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=torch.arange(4, dtype=torch.int32),
            query_start_loc_cpu=torch.arange(4, dtype=torch.int32),
            seq_lens=lengths,
            num_reqs=3,
            num_actual_tokens=3,
            max_query_len=1,
            max_seq_len=300 + index,
            block_table_tensor=torch.zeros(3, 4, dtype=torch.int32),
            slot_mapping=torch.zeros(3, dtype=torch.int64),
            seq_lens_cpu_upper_bound=lengths.clone(),
        )
        made = builder.build_for_drafting(common, index)
        assert common.seq_lens[0] == 300 + index, "the target's and the draft's own attention read these"
        found.append([*made.seq_lens.tolist(), made.max_seq_len])
    return found


class OtherAttention(Attention):
    """Stands for layers of another kind."""


def main() -> None:
    own = SimpleNamespace(glide={"target": SHAPE | {"max_position_embeddings": 1, "rope_parameters": ROPE}})
    changes: dict[str, dict[str, Any]] = {
        "right": {},
        "v2": {"v2": True},
        "multimodal": {"multimodal": True},
        "pipeline": {"pipeline": 2},
        "context": {"context": 2},
        "fast": {"fast": True},
        "draft_tp": {"draft_tp": 1},
        "cache": {"cache": "fp8"},
        "lora": {"lora": SimpleNamespace()},
        "positions": {"positions": 32},
        "asked for": {"positions": 32, "given_positions": 32},
        "method": {"method": "eagle"},
        "target": {"target": SHAPE | {"vocab_size": 600}},
        "rotation": {"target": SHAPE | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5}}},
        "stretched": {"target": SHAPE | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}},
    }
    found: dict[str, Any] = {name: said(target.checked_target, config(**changed), own) for name, changed in changes.items()}
    found["plain layers"] = said(target.last_attention, layers(None, None))
    found["sliding"] = said(target.last_attention, layers(None, 64))
    found["mixed"] = said(target.last_attention, layers(64, None))
    found["other layers"] = said(target.last_attention, layers(None, kind=OtherAttention))
    as_stored = [SimpleNamespace(layer_name=f"layers.{number}", kv_cache_dtype="fp8") for number in range(3)]
    found["same dtype"] = said(target.check_dtypes, *as_stored)
    as_stored[2].kv_cache_dtype = "auto"
    found["skipped"] = said(target.check_dtypes, *as_stored)
    found["backend"] = said(target.last_attention, layers(None, backend="FLASHINFER"))
    flash = {"aot_schedule": False, "aot_sliding_window": None, "use_full_cuda_graph": False, "dcp_world_size": 1}
    flash |= {"max_cudagraph_size": None, "mm_prefix_query_ranges_np": None}
    segments = ("output", "max", "expsum")
    triton = {"seq_threshold_3D": 1, "num_par_softmax_segments": 1, "max_seqs_64_segments": 0}
    triton |= {f"softmax_segm_{name}": torch.zeros(1) for name in segments}
    found["flash"] = drafting_lengths(FlashAttentionBackend, **flash)
    found["triton"] = drafting_lengths(TritonAttentionBackend, **triton)
    warned: list[str] = []
    handler = type("Kept", (logging.Handler,), {"emit": lambda _, record: warned.append(record.getMessage())})()
    logging.getLogger("vllm.longspec_vllm").addHandler(handler)
    vllms_own = rejection_sampler.expand_batch_to_tokens
    vllm.__version__ = "0.99.0"
    said(target.checked_target, config(), own)
    longspec_vllm.register()
    assert rejection_sampler.expand_batch_to_tokens is vllms_own
    print(json.dumps(found | {"warned": warned}))


if __name__ == "__main__":
    main()
