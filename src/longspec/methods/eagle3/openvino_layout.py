"""Write a draft folder as optimum-intel converts it for OpenVINO GenAI: its class LlamaEagle3ForCausalLM, version 2.2.0.

The tensors are those of a draft's folder, always with d2t and t2d. `hidden_layers_list` has the layers whose outputs the draft
reads, one less than the layers whose inputs it reads; measure/engines/openvino_ir.py puts them into the converted file.
"""

from pathlib import Path

import torch

from longspec.config.faults import faults_in
from longspec.engines import ENGINES, OPENVINO
from longspec.methods import exported_draft
from longspec.methods.draft_files import CONFIG
from longspec.methods.eagle3.method import METHOD
from longspec.methods.layer_config import OF_ONE_LAYER
from longspec.methods.layer_shape import PARTIAL
from longspec.methods.vocabulary_tensors import D2T, T2D
from longspec.models.weight_files import telling_damage

FAMILIES = ENGINES[OPENVINO].targets or ()
OF_THE_LAYER = (*OF_ONE_LAYER, "architectures", "draft_vocab_size")
LAYERS = "hidden_layers_list"


def write(folder: Path, out: Path, dtype: str | None, context: int | None) -> None:
    """Write the folder.

    Raises ValueError for a target or a rotation that OpenVINO cannot represent, and as exported_draft does.
    """
    draft = exported_draft.read(folder, METHOD, "openvino", context)
    file, content, tensors = folder / CONFIG, draft.content, draft.tensors
    family, part = content["target"].get("model_type"), content["rope_parameters"].get(PARTIAL, 1)
    with faults_in(str(file)):
        if family not in FAMILIES:
            raise ValueError(
                f"target: model_type: {family}: OpenVINO finds the outputs of layers in targets of {', '.join(FAMILIES)} "
                "alone; serve this draft by vLLM"
            )
        if part != 1:
            raise ValueError(
                f"rope_parameters: {PARTIAL}: {part}: a draft in OpenVINO turns whole heads; train one with "
                "recipe.method.rope_parameters: {rope_type: default, rope_theta: 10000.0}, or serve this draft by vLLM"
            )
    with telling_damage(file, "is no configuration of a draft"):
        config = {name: content[name] for name in OF_THE_LAYER}
        config[LAYERS] = [number - 1 for number in content["eagle_aux_hidden_state_layer_ids"]]
    if D2T not in tensors:  # all of the target's tokens are proposed
        tensors[D2T] = torch.zeros(content["draft_vocab_size"], dtype=torch.int64)
    tensors.setdefault(T2D, torch.ones(content["vocab_size"], dtype=torch.bool))
    exported_draft.write_folder(out, "openvino", config, tensors, dtype)
