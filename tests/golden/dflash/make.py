"""Makes speculators.safetensors beside this file: DFlash's training as the package `speculators` computes it.

    python -m venv /tmp/speculators
    /tmp/speculators/bin/pip install torch==2.13.0 transformers==5.19.0 speculators==0.9.0
    /tmp/speculators/bin/python tests/golden/dflash/make.py

It runs in that environment, as tests/golden/eagle3/make.py does, and imports nothing of longspec. Written are a tiny target
and two drafts of random weights, and for two packed rows of each draft what speculators' own model (models/dflash/core.py)
makes of them in float32 with the attention `eager` and KL divergence: the logits of all slots, its loss, and the gradient of
every weight.

Its draw of anchors is replaced by a fixed one, whose blocks end in their documents: it would also train slots past a
document's end. Its loss is left as it is, the mean over what its mask names of divergences weighted exp(-(k - 1) / gamma).
Masked are tokens that are not trained, and those for which the target prefers a token outside the draft vocabulary. The head
of a reduced vocabulary, which it freezes, is given a gradient. The norms of keys of the draft `full` are the same in all
layers.

Shapes: S tokens of a row, A blocks, W slots of a block, H hidden width, T target's vocabulary, V draft vocabulary.
"""

import json
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.losses import resolve_loss_config
from speculators.models.dflash import core
from speculators.models.dflash.core import DFlashDraftModel
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

FILE = Path(__file__).parent / "speculators.safetensors"
TARGET = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
LAYERS, SLOTS, GAMMA, MASK = [1, 2, 4], 5, 3.0, 63
# Documents of a row, and its anchors, ascending.
ROWS = (((18, 14), (1, 2, 7, 12, 19, 24, 27)), ((23,), (0, 5, 6, 16, 17)))
# The draft vocabulary, the number of layers, and whether the norms of keys are one.
DRAFTS = {"full": (64, 3, True), "reduced": (40, 2, False)}


def randomize(module: nn.Module) -> None:
    """Weights at which every part matters; those without a gradient stay."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            nn.init.uniform_(parameter, 0.5, 1.5) if parameter.ndim == 1 else nn.init.normal_(parameter, std=0.3)


def build(folder: str, vocabulary: int, depth: int, is_tied: bool) -> DFlashDraftModel:
    """The draft as its own training makes it beside a target's folder, with random weights."""
    t2d = d2t = None
    if vocabulary < TARGET["vocab_size"]:
        ids_V = torch.randperm(TARGET["vocab_size"])[:vocabulary].sort().values
        t2d, d2t = torch.zeros(TARGET["vocab_size"], dtype=torch.bool), ids_V - torch.arange(vocabulary)
        t2d[ids_V] = True
    model = DFlashDraftModel.from_training_args(
        Qwen3Config(**TARGET | {"num_hidden_layers": depth}),
        t2d=t2d,
        d2t=d2t,
        draft_vocab_size=vocabulary,
        block_size=SLOTS,
        mask_token_id=MASK,
        target_layer_ids=LAYERS,
        verifier_name_or_path=folder,
        draft_attn_impl="eager",
    )
    model.lm_head.requires_grad_(t2d is not None)
    model.embed_tokens.requires_grad_(False)
    randomize(model)
    for layer in model.layers[1:] if is_tied else ():
        layer.self_attn.k_norm.weight.data.copy_(model.layers[0].self_attn.k_norm.weight)
    return model


@torch.no_grad()
def target_states(target: LlamaForCausalLM, documents: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs of the layers that are read [S, 3 H], the final norm's input [S, H], and logits [S, T], each document alone."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for ids_S in documents:
        before_norm: list[Tensor] = []
        with target.model.norm.register_forward_pre_hook(lambda _, inputs, kept=before_norm: kept.append(inputs[0][0])):
            out = target(ids_S[None], output_hidden_states=True)
        taps = torch.cat([out.hidden_states[layer][0] for layer in LAYERS], dim=-1)
        found.append((taps, before_norm[0], out.logits[0]))
    taps, last, logits = (torch.cat(each) for each in zip(*found, strict=True))
    return taps, last, logits


def row(model: DFlashDraftModel, target: LlamaForCausalLM, lengths: tuple[int, ...], anchors: Tensor) -> dict[str, Tensor]:
    """One row of random documents: what goes in and what comes out."""
    documents = [torch.randint(0, TARGET["vocab_size"], (length,)) for length in lengths]
    taps_SX, last_SH, logits_ST = target_states(target, documents)
    ids_S, numbers_S = torch.cat(documents), torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    trained_S = torch.ones_like(ids_S, dtype=torch.bool)
    trained_S[9::10] = False
    counts_S = trained_S.clone()
    if model.t2d is not None:  # of token j: whether the target's likeliest one in its place can be said
        counts_S[1:] &= model.t2d[logits_ST.argmax(-1)][:-1]
    core.select_anchors = lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool))
    kept: list[Tensor] = []
    model.zero_grad()
    with model.lm_head.register_forward_hook(lambda _, __, output: kept.append(output[0].detach())):
        _, loss, _ = model(
            hidden_states=taps_SX[None],
            input_ids=ids_S[None],
            loss_mask=counts_S[None].long(),
            verifier_last_hidden_states=last_SH[None],
            document_ids=numbers_S[None],
            position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
            loss_config=resolve_loss_config("kl_div", "eager"),
            gamma=GAMMA,
            max_anchors=len(anchors),
        )
    loss.backward()
    places_AK = anchors[:, None] + torch.arange(1, SLOTS)
    found = {"ids": ids_S, "documents": numbers_S, "trained": trained_S, "anchors": anchors, "loss": loss.detach()}
    found |= {"count": counts_S[places_AK].sum(), "logits": kept[0].unflatten(0, (len(anchors), SLOTS))}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return found | {f"gradient/{name}": parameter.grad.clone() for name, parameter in trained.items()}


def main() -> None:
    """Write the file."""
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(**TARGET)).eval()
    randomize(target)
    tensors = {f"target/{name}": tensor for name, tensor in target.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        target.save_pretrained(folder)
        for name, (vocabulary, depth, is_tied) in DRAFTS.items():
            model = build(folder, vocabulary, depth, is_tied)
            weights = {key: value.detach() for key, value in model.named_parameters() if value.requires_grad}
            if model.d2t is not None:
                weights["d2t"] = model.d2t
            tensors |= {f"{name}/weights/{key}": value for key, value in weights.items()}
            for number, (lengths, anchors) in enumerate(ROWS):
                found = row(model, target, lengths, torch.tensor(anchors))
                tensors |= {f"{name}/{number}/{key}": value for key, value in found.items()}
    versions = {package: version(package) for package in ("speculators", "transformers", "torch")}
    drafts = {name: {"depth": depth, "tied_k_norm": is_tied} for name, (_, depth, is_tied) in DRAFTS.items()}
    shape = {"layers": LAYERS, "block_size": SLOTS, "gamma": GAMMA, "mask_token": MASK}
    about = {"target": TARGET, "shape": shape, "drafts": drafts, "versions": versions}
    # One entry alone: several would be written in an order that changes from run to run.
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, FILE, {"about": json.dumps(about)})
    print(f"{FILE}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
