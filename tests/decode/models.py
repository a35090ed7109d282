"""Tiny random targets and drafts, and drafters that know the target."""

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from longspec.decode.budget import grown
from longspec.decode.drafters import Drafter, DraftInput
from longspec.decode.levels import Budget, Levels, depth_of
from longspec.decode.sampling import Sampler
from longspec.decode.tree import DraftTree, TreeBuilder, chains
from longspec.draft_vocabulary import DraftVocabulary
from longspec.methods.dflash import settings as dflash
from longspec.methods.dflash.drafter import DFlashDrafter
from longspec.methods.dflash.layer import DFlashLayer
from longspec.methods.eagle3.drafter import Eagle3Drafter
from longspec.methods.eagle3.layer import Eagle3Layer
from longspec.methods.eagle3.settings import Settings
from longspec.methods.glide.drafter import GlideDrafter
from longspec.methods.glide.layer import GlideLayer
from tests.targets import SHAPES

SHAPE = SHAPES | {"vocab_size": 61, "max_position_embeddings": 512, "initializer_range": 0.4}
WINDOW = 12
METHODS = ("glide", "eagle3", "dflash")
THREE = {"num_hidden_layers": 3}
DEPTHS = {"glide": {}, "eagle3": THREE, "dflash": THREE}  # of targets, whose layers drafts read
SMALL = {"vocab_size": 10, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def make_target(seed: int, family: type = Qwen2Config, **shape):
    torch.manual_seed(seed)
    config = family(**SHAPE | shape, eos_token_id=None, bos_token_id=None)
    return AutoModelForCausalLM.from_config(config).double().eval()


def make_layer(target, scale: float = 0.2) -> GlideLayer:
    return scattered(GlideLayer(target.config), scale)


def scattered(layer, scale: float):
    layer = layer.double().eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=scale)
    return layer


def chosen(target, ids: tuple[int, ...] | None) -> dict:
    """Settings of a draft vocabulary."""
    return {"vocabulary": ids and len(ids), "ids": ids, "target_vocabulary": target.config.vocab_size}


def make_eagle3(target, window: int | None = None, ids: tuple[int, ...] | None = None, scale: float = 0.3, **options):
    settings = Settings(layers=(0, 1, 2), sliding_window=window, **chosen(target, ids), **options)
    return Eagle3Drafter(target, scattered(Eagle3Layer(target.config, settings), scale), settings)


def make_dflash(target, window: int | None = None, ids: tuple[int, ...] | None = None, scale: float = 0.3, **options):
    """Two layers; blocks as deep as the deepest trees of these tests."""
    shape = {"layers": (1, 2), "depth": 2, "block_size": 6} | options
    settings = dflash.Settings(sliding_window=window, **chosen(target, ids), **shape)
    return DFlashDrafter(target, scattered(DFlashLayer(target.config, settings), scale), settings)


def make_drafter(method: str, target, window: int | None = WINDOW, ids: tuple[int, ...] | None = None, scale: float = 0.2):
    """A drafter of random weights; the target has as many layers as DEPTHS says."""
    if method == "eagle3":
        return make_eagle3(target, window, ids, scale)
    if method == "dflash":
        return make_dflash(target, window, ids, scale)
    vocabulary = None if ids is None else DraftVocabulary(ids, target.config.vocab_size, "", {"all": 1.0})
    return GlideDrafter(target, make_layer(target, scale), window, vocabulary)


def generated(target, prompt: list[int], count: int, **options) -> list[int]:
    ids_BS = torch.tensor([prompt])
    whole = {"attention_mask": torch.ones_like(ids_BS), "pad_token_id": 0, "eos_token_id": None, "do_sample": False}
    return target.generate(ids_BS, max_new_tokens=count, **whole | options)[0, len(prompt) :].tolist()


class Oracle(Drafter):
    """Knows each row's whole text; a wrong one proposes the next token of the vocabulary instead."""

    def __init__(self, texts: list[list[int]], wrong: bool = False) -> None:
        self.texts, self.wrong = texts, wrong

    def propose(self, draft_input: DraftInput, shape: Levels | Budget, sampler: Sampler) -> DraftTree:
        ahead = []
        for text in draft_input.texts:
            (whole,) = (known for known in self.texts if known[: len(text)] == text)
            ahead.append([(token + self.wrong) % 61 for token in (whole + [0] * 9)[len(text) :][: depth_of(shape)]])
        return chains(draft_input.roots_B, torch.tensor(ahead))


class Itself(Drafter):
    """Drafts by the target, warped alike."""

    def __init__(self, target) -> None:
        self.target = target

    def propose(self, draft_input: DraftInput, shape: Levels | Budget, sampler: Sampler) -> DraftTree:
        builder, texts = TreeBuilder(draft_input.roots_B), [torch.tensor(draft_input.texts)[:, None]]

        def logits() -> Tensor:
            if builder.nodes > 1:
                parents_BC = builder.parents[-1] - (builder.nodes - sum(builder.sizes[-2:]))
                above_BCT = texts[-1][torch.arange(len(parents_BC))[:, None], parents_BC]
                texts.append(torch.cat([above_BCT, builder.tokens[-1][:, :, None]], dim=-1))
            return self.target(texts[-1].flatten(0, 1)).logits[:, -1].unflatten(0, texts[-1].shape[:2])

        return grown(builder, shape, sampler, logits)
