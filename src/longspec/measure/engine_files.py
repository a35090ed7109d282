"""Give an engine a target and a drafter: the folders as they are, or files in its layouts that exist only while it runs."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig

from longspec import methods
from longspec.config.names import LOOKUP, UNTRAINED
from longspec.draft.folder import draft_config, write_draft
from longspec.draft.layouts import write_layout
from longspec.draft_vocabulary import DraftVocabulary
from longspec.engines import Engine
from longspec.measure.served import RefusedError
from longspec.methods import layouts_of, method_of
from longspec.models.target import load_target
from longspec.models.target_config import read_target_config
from longspec.states.forward import TargetStates

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}  # dtype of a layout's weights


def served_target(path: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the facts of a target that another process loads, under the attribute names of a loaded one."""
    config, own = read_target_config(path), Path(path) / "generation_config.json"
    told = GenerationConfig.from_pretrained(path) if own.is_file() else GenerationConfig.from_model_config(config)
    return SimpleNamespace(path=path, config=config, generation_config=told, dtype=dtype, device=device)


def settings_of_drafter(options: Namespace, recipe: Any, vocabulary: DraftVocabulary | None) -> tuple[Any, Any]:
    """Return a drafter's method and settings: the recipe's, or those beside its weights if it is not that recipe's stage.

    A method with a vocabulary of its own always takes the recipe's. options: of evaluate.
    """
    method, settings = method_of(recipe, vocabulary)
    is_stage = options.drafter in (UNTRAINED, recipe.stage)
    # The stages of a run have one `recipe.method`, so a method with a vocabulary of its own has the same settings in each.
    if not (is_stage or methods.has_own_vocabulary(recipe.method.name)) and (options.draft / "config.json").is_file():
        settings = method.stored_settings(options.draft)
    return method, settings


@contextmanager
def loaded(
    engine: Engine, options: Namespace, target: Any, recipe: Any, vocabulary: DraftVocabulary | None, context: int
) -> Iterator[dict[str, str | None]]:
    """Yield the fields of a Job that say what an engine loads; files written for it are removed after the block.

    options: of evaluate; a target or draft given there in the engine's layout is loaded instead of a written one. context:
    tokens of the longest text with its drafts. Raises ValueError if the draft is damaged or does not fit recipe and target,
    which engines hardly check; RefusedError if the engine's layout cannot represent target or draft.
    """
    with TemporaryDirectory() as place:
        kind, draft = engine.lookup, None
        if options.drafter != LOOKUP:
            served = methods.served(recipe.method.name, engine.name)
            kind, draft = served.kind, _checked(options, Path(place), target, recipe, vocabulary)
            if options.served_draft is not None and options.drafter != UNTRAINED:
                draft = options.served_draft
            elif served.layout is not None:
                out = Path(place) / f"draft.{served.layout}"
                anew = hasattr(layouts_of(recipe.method.name)[served.layout], "write")  # the layout rewrites the weights
                try:
                    write_layout(draft, served.layout, out, *((DTYPES[target.dtype], context) if anew else ()))
                except ValueError as error:
                    raise RefusedError(str(error)) from None
                draft = out
        model = target.path
        if options.served_target is not None:
            model = str(options.served_target)
        elif engine.target_layout is not None:
            from longspec.target.layouts import write_target  # torch and gguf: only llama.cpp needs them

            model = str(Path(place) / f"target.{engine.target_layout}")
            try:
                write_target(Path(target.path), engine.target_layout, Path(model), DTYPES[target.dtype])
            except ValueError as error:
                raise RefusedError(str(error)) from None
        yield {"model": model, "method": kind, "draft": None if draft is None else str(draft), "scratch": place}


def _checked(options: Namespace, place: Path, target: Any, recipe: Any, vocabulary: DraftVocabulary | None) -> Path:
    """Return the draft folder to load: the stage's, if it fits recipe and target, or fresh weights written to `place`."""
    method, settings = settings_of_drafter(options, recipe, vocabulary)
    if options.drafter != UNTRAINED:
        method.load(method.layer(target.config, settings), options.draft, target.config, settings)
        return Path(options.draft)
    # This target lends its norm and head and is freed afterwards: the engine loads its own.
    states = TargetStates(load_target(target.path, target.config, target.dtype))
    torch.manual_seed(recipe.seed)
    weights = method.published(method.trainer(states, settings, None).draft_model.state_dict(), settings)
    write_draft(place / "draft", weights, draft_config(target.path, recipe, vocabulary))
    return place / "draft"
