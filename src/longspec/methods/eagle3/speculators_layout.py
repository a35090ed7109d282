"""Write a draft folder as the package `speculators` 0.9.0 does and reads it (github.com/vllm-project/speculators).

From its source: models/eagle3/core.py, the tensors: the engines' layout with `layers.0.` for `midlayer.`; embed_tokens may be
missing, then the verifier's is used. models/eagle3/config.py and config.py, the fields of config.json. vLLM's reader of them
(transformers_utils/configs/speculators) takes norm_before_residual for true by default, and passes transformer_layer_config on
unchanged, without LlamaConfig's defaults, so no field may be missing there. eagle_aux_hidden_state_layer_ids are inputs of
layers (models/utils.py, resolve_target_layer_ids; vLLM passes them on).
"""

from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from longspec.config.names import HUB_PREFIX
from longspec.methods import exported_draft
from longspec.methods.eagle3.method import METHOD
from longspec.methods.eagle3.settings import NORMS
from longspec.methods.layer_config import OF_ONE_LAYER

VERSION = "0.9.0"
OURS, THEIRS = "midlayer.", "layers.0."
OF_THE_LAYER = (*OF_ONE_LAYER, "dtype", "layer_types", "sliding_window")
OF_THE_DRAFT = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", *NORMS, "tie_word_embeddings", "dtype")


def write(folder: Path, out: Path, dtype: str | None, context: int | None) -> None:
    """Write the folder. Raises ValueError as exported_draft does, and if a context is given."""
    if context is not None:
        raise ValueError(f"--context: {context}: the layout speculators has the draft's own; leave it out")
    draft = exported_draft.read(folder, METHOD, "speculators", context)
    config = draft.content
    # Without a window there are no layer_types and no sliding_window; if the target names no dtype there is none.
    of_layer, of_draft = ({name: config[name] for name in names if name in config} for names in (OF_THE_LAYER, OF_THE_DRAFT))
    source = config["target_source"]
    verifier = {
        "name_or_path": source.removeprefix(HUB_PREFIX) if source.startswith(HUB_PREFIX) else config["target_path"],
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["target"]["model_type"]]],
    }
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": draft.settings.steps,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    written = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "transformer_layer_config": of_layer,
        "embed_requires_grad": False,
        "target_hidden_size": None,
    } | of_draft
    tensors = {name.replace(OURS, THEIRS, 1): tensor for name, tensor in draft.tensors.items()}
    exported_draft.write_folder(out, "speculators", written, tensors, dtype)
