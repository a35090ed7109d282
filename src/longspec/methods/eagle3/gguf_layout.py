"""Write a draft folder as the GGUF file that llama.cpp loads with its target: architecture `eagle3`, of one decoder layer.

From llama.cpp's loader (src/models/eagle3.cpp): hidden_norm is `attn_norm_2`, the norm before fc `enc.output_norm`; queries and
keys rotate as in the architecture `llama`.
"""

from pathlib import Path

from longspec.methods import gguf_draft
from longspec.methods.eagle3.method import METHOD
from longspec.models.gguf_writer import permuted

OUTSIDE = {"input_norm.weight": "enc.output_norm.weight", "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight"}


def write(folder: Path, out: Path, dtype: str | None, context: int | None) -> None:
    """Write the file. Raises ValueError as gguf_draft and gguf_writer do."""
    draft = gguf_draft.read(folder, METHOD, context)
    for name, heads in (("q", draft.config.num_attention_heads), ("k", draft.config.num_key_value_heads)):
        name = f"midlayer.self_attn.{name}_proj.weight"
        draft.tensors[name] = permuted(draft.tensors[name], heads)
    keys = {
        "target_layers": draft.content["eagle_aux_hidden_state_layer_ids"],
        "target_hidden_size": int(draft.config.hidden_size),
        "norm_before_residual": draft.settings.norm_before_residual,
        "norm_before_fc": draft.settings.norm_before_fc,
    }
    gguf_draft.write(draft, OUTSIDE, keys, out, dtype)
