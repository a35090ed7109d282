"""Write a draft folder as the GGUF file that llama.cpp loads with its target: architecture `dflash`.

From llama.cpp's loader (src/models/dflash.cpp, common/speculative.cpp): hidden_norm is `enc.output_norm`; queries and keys
rotate as here; sliding_window counts the query itself, and applies to the layers in its pattern; if `attention.causal` is set,
slots see no later slots of their block, in layers of either kind.
"""

from pathlib import Path

from longspec.methods import gguf_draft
from longspec.methods.dflash.method import METHOD

OUTSIDE = {"hidden_norm.weight": "enc.output_norm.weight"}


def write(folder: Path, out: Path, dtype: str | None, context: int | None) -> None:
    """Write the file. Raises ValueError as gguf_draft and gguf_writer do, and for Llama 3's rotation."""
    draft = gguf_draft.read(folder, METHOD, context)
    if draft.config.rope_parameters["rope_type"] == "llama3":
        raise ValueError(
            f"{folder / 'config.json'}: rope_parameters: llama3: llama.cpp turns DFlash's drafts by plain or linear "
            "frequencies alone; serve this one by vLLM, or train with "
            "recipe.method.rope_parameters: {rope_type: default, rope_theta: 10000.0}"
        )
    block, window = draft.content["dflash_config"], draft.settings.sliding_window
    keys = {
        "target_layers": [layer + 1 for layer in block["target_layer_ids"]],
        "block_size": draft.settings.block_size,
        "attention.causal": window is not None,
        "tokenizer.ggml.mask_token_id": int(block["mask_token_id"]),
    }
    if window is not None:
        every = [True] * draft.settings.depth
        keys |= {"attention.sliding_window": window, "attention.sliding_window_pattern": every}
    gguf_draft.write(draft, OUTSIDE, keys, out, dtype)
