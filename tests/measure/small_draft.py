"""A Qwen2 of twelve layers that knows some modules of the standard library by heart, and a draft for it, in minutes.

Held-out records are the trained ones: what is compared are two engines on the same draft, not what the draft has learnt.
"""

import sysconfig
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from longspec.atomic_files import read_json, write_text
from longspec.config import Build, compose, to_yaml
from longspec.config.schema import Model
from longspec.data import draft_vocabulary, tokenize
from longspec.data.pack import packing
from longspec.data.pack.arrow_shards import PackedRows
from longspec.draft.folder import draft_config, write_draft
from longspec.draft_vocabulary import read_draft_vocabulary
from longspec.methods import method_of
from longspec.methods.eagle3 import settings as eagle3
from longspec.models.target import load_target
from longspec.models.target_config import read_target_config
from longspec.states.forward import TargetStates
from longspec.target import tokenizer, train
from tests.corpus import write_raw
from tests.measure.demo_draft import Measured

MODULES = ("bisect", "colorsys")
LENGTH, VOCABULARY, PROPOSED = 128, 384, 320
LAYERS = (2, 6, 9)  # of twelve; the default too: 2, L // 2, L - 3
METHOD, DRAFT = eagle3.Method(vocabulary=PROPOSED, layers=list(LAYERS)), eagle3.Draft(steps=4)


def make(root: Path, target_steps: int = 350, draft_steps: int = 400) -> Measured:
    """Train both below `root`."""
    library = Path(sysconfig.get_path("stdlib"))
    records = [{"text": (library / f"{name}.py").read_text(encoding="utf-8")} for name in MODULES]
    raw = write_raw(root / "raw", records, records)
    target = root / "model/target_manifest.json"
    mixture = [{"dataset": "raw", "sequence_length": LENGTH, "rows": 4, "steps": target_steps}]
    shape = {"hidden": 64, "layers": 12, "heads": 4, "key_value_heads": 2, "intermediate": 128}
    build = Build(vocabulary=VOCABULARY, **shape, max_position=2048, mixture=mixture, lr=3e-3)
    tokenizer.make(build, [raw], root / "model/tokenizer_manifest.json")
    tokenize.make(raw, root / "model/tokenizer_manifest.json", 0, 1, root / "tokens/000.json")
    packed = root / "packed/manifest.json"
    packing.make([root / "tokens/000.json"], LENGTH, "base", "split", packed)
    was_exact = torch.are_deterministic_algorithms_enabled()
    print(train.make(build, root / "model/tokenizer_manifest.json", [packed], target))
    torch.use_deterministic_algorithms(was_exact)
    vocabulary = root / f"draft_vocabulary_{PROPOSED}.json"
    draft_vocabulary.make([("raw", packed)], target, PROPOSED, None, vocabulary)
    recipe = compose("train", ["run=demo"]).recipe.copy()
    OmegaConf.set_readonly(recipe, False)
    recipe.method, recipe.draft = OmegaConf.structured(METHOD), OmegaConf.structured(DRAFT)
    recipe.model = OmegaConf.structured(Model("small", "build", "qwen2"))
    made = Measured(target, root / "draft", root / "recipe.yaml", raw, vocabulary)
    write_text(made.recipe, to_yaml(recipe))
    _train_draft(made, recipe, PackedRows(packed), draft_steps)
    return made


def _train_draft(made: Measured, recipe: Any, rows: PackedRows, steps: int) -> None:
    """Train the draft by AdamW, four rows a step, and write its folder."""
    vocabulary = None if made.vocabulary is None else read_draft_vocabulary(made.vocabulary)
    path = read_json(made.target)["path"]
    method, settings = method_of(recipe, vocabulary)
    states = TargetStates(load_target(path, read_target_config(path), torch.float32))
    torch.manual_seed(0)
    trainer = method.trainer(states, settings, None)
    for name, parameter in trainer.draft_model.named_parameters():
        if "norm" in name:  # that none can be left out unseen
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    optimizer = torch.optim.AdamW(trainer.draft_model.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 10) * (1 - step / steps))
    draw = torch.Generator().manual_seed(0)
    for step in range(steps):
        chosen = torch.randint(len(rows), (4,), generator=draw).tolist()
        batch = [rows[number] for number in chosen]
        ids_BS, positions_BS, documents_BS = (
            torch.stack([torch.from_numpy(getattr(row, name)).long() for row in batch])
            for name in ("input_ids_S", "position_ids_S", "document_ids_S")
        )
        found = trainer(ids_BS, ids_BS, positions_BS, documents_BS, with_llm_loss=False)
        found.loss.backward()
        torch.nn.utils.clip_grad_norm_(trainer.draft_model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0 or step + 1 == steps:
            print(
                f"draft step {step + 1}/{steps} loss {found.loss.item():.3f} agreement {found.agreement.item():.3f}", flush=True
            )
    weights = method.published(trainer.draft_model.state_dict(), settings)
    write_draft(made.draft, weights, draft_config(path, recipe, vocabulary))
