"""Convert a target and its EAGLE-3 draft to OpenVINO's model files (IR), in float32. OpenVINO rounds them itself if asked to.

    python -m longspec.measure.engines.openvino_ir TARGET OUT                  in an environment that has optimum-intel
    python -m longspec.measure.engines.openvino_ir TARGET OUT --draft DRAFT    DRAFT: an export of the layout openvino

From optimum-intel 2.2.0 (exporters/openvino) and OpenVINO GenAI 2026.4 (speculative_decoding/eagle3_model_transforms.cpp):

embeddings: a pipeline replaces the draft's by the target's; the file needs some, so it has the target's.
hidden_layers_list: an entry of the file's rt_info: three layers whose outputs the draft reads. If it is missing and there are
    ten layers or more, the outputs of layers 2, L // 2 and L - 3 are used; drafts made elsewhere read the inputs of these.
d2t: target token minus draft token, as in the draft's file.
"""

import argparse
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

MODEL = "openvino_model.xml"
LAYERS = "hidden_layers_list"
TASK = "text-generation-with-past"


def is_converted(folder: Path) -> bool:
    """Tell whether a folder has a model in OpenVINO's format."""
    return (folder / MODEL).is_file()


def convert_target(folder: Path, out: Path) -> None:
    """Write a target's folder as OpenVINO's, with its tokenizer where it has one."""
    from transformers import AutoTokenizer

    _write(_load_target(folder), out)
    if (folder / "tokenizer.json").is_file():
        from optimum.exporters.openvino.convert import export_tokenizer

        export_tokenizer(AutoTokenizer.from_pretrained(folder, trust_remote_code=False), out)


def layers_of(folder: Path) -> list[int]:
    """Return the layers whose outputs a draft reads. Raises ValueError if the folder's configuration does not name them."""
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if LAYERS not in content:
        raise ValueError(f"{folder}: config.json has no {LAYERS}; make it by `longspec export DRAFT --layout openvino`")
    return [int(layer) for layer in content[LAYERS]]


def convert_draft(folder: Path, target: Path, out: Path) -> None:
    """Write a draft of the layout `openvino` as OpenVINO's, with its target's embeddings and the layers that it reads."""
    import openvino
    import torch
    from optimum.exporters.openvino.model_patcher import LlamaEagle3ForCausalLM
    from safetensors.torch import load_file
    from transformers import LlamaConfig

    class Draft(LlamaEagle3ForCausalLM):
        """Define the class here: optimum-intel cannot tell the library of its own classes."""

    layers, content = layers_of(folder), json.loads((folder / "config.json").read_text(encoding="utf-8"))
    draft = Draft(LlamaConfig(**content))
    tensors = {f"model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    with torch.no_grad():
        tensors["model.embed_tokens.weight"] = _load_target(target).get_input_embeddings().weight
    draft.load_state_dict(tensors, strict=True)
    plain = out.with_name(f"{out.name}.plain")
    _write(draft.float(), plain)
    model = openvino.Core().read_model(plain / MODEL)
    model.set_rt_info(layers, [LAYERS])
    openvino.save_model(model, out / MODEL, compress_to_fp16=False)
    shutil.copyfile(plain / "config.json", out / "config.json")
    del model  # its weights are mapped from a file in a folder that is removed after this


def _load_target(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)


def _write(model: Any, out: Path) -> None:
    from optimum.exporters.openvino.convert import export_from_model
    from optimum.intel import OVConfig

    export_from_model(model.eval(), out, task=TASK, ov_config=OVConfig(dtype="fp32"), stateful=True)


def make(target: Path, draft: Path | None, out: Path) -> None:
    """Write out/target and, if there is a draft, out/draft. An existing folder is kept; each new one appears whole."""
    work: dict[str, Callable[[Path], None]] = {"target": partial(convert_target, target)}
    if draft is not None:
        work["draft"] = partial(convert_draft, draft, target)
    out.mkdir(parents=True, exist_ok=True)
    for name, convert in work.items():
        if not (out / name).exists():
            with TemporaryDirectory(dir=out) as place:
                (beside := Path(place) / name).mkdir()
                convert(beside)
                beside.rename(out / name)


def main() -> None:
    """Convert the models that the command line names."""
    parser = argparse.ArgumentParser(description="Write a target and its EAGLE-3 draft in OpenVINO's format.")
    parser.add_argument("target", type=Path, help="the target's folder")
    parser.add_argument("out", type=Path, help="the folder to make `target` and `draft` in")
    parser.add_argument("--draft", type=Path, help="a draft as `longspec export DRAFT --layout openvino` writes it")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").setLevel(logging.ERROR)  # its tracer warns for each layer
    try:
        make(options.target, options.draft, options.out)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
