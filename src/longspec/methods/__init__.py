"""Look up draft methods by name. contract.py says what each must answer. No torch here: runs are planned with this module."""

from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspec.draft_vocabulary import DraftVocabulary, read_draft_vocabulary
from longspec.engines import ENGINES, OURS, Served

if TYPE_CHECKING:
    from longspec.decode.drafters import Drafter
    from longspec.methods.contract import Method


def names() -> list[str]:
    """Return the names of all methods: the folders of this package."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/settings.py"))


def settings_of(name: str) -> Any:
    """Return a method's settings module. Raises ValueError, naming the known methods, for an unknown one."""
    if name not in names():
        raise ValueError(f"recipe.method.name: {name!r} is unknown; choose one of {', '.join(names())}")
    return import_module(f"longspec.methods.{name}.settings")


def method(name: str) -> "Method":
    """Return a method by its name. Raises ValueError, naming the known methods, for an unknown one."""
    settings_of(name)
    return import_module(f"longspec.methods.{name}.method").METHOD


def layouts_of(name: str) -> dict[str, Any]:
    """Return layout name -> module, for each layout of another program that a method can write its draft folders in."""
    files = sorted((Path(__file__).parent / name).glob("*_layout.py"))
    return {path.stem.removesuffix("_layout"): import_module(f"longspec.methods.{name}.{path.stem}") for path in files}


def served(name: str, engine: str) -> Served:
    """Return how an engine loads draft folders of a method. Raises ValueError, with the key, if it loads none."""
    found: Served | None = settings_of(name).SERVED.get(engine)
    if found is None:
        others = [each for each in ENGINES if each in settings_of(name).SERVED]
        others = [f"evaluation.engine: {each}" for each in (OURS, *others)]
        raise ValueError(f"evaluation.engine: {engine}: loads no {name} drafts; set {' or '.join(others)}")
    return found


def check_layout(name: str, values: Any, layout: str | None, context: int | None) -> None:
    """Raise ValueError, with the key, for values of recipe.method that a layout cannot represent with `context` tokens."""
    check = getattr(settings_of(name), "check_layout", None)
    if layout is not None and check is not None:
        check(layout, values, context)


def implied(name: str, tokens: int) -> dict[str, Any]:
    """Return the keys of recipe.method that follow from a target with `tokens` tokens."""
    of_tokens = getattr(settings_of(name), "implied", None)
    return {} if of_tokens is None else dict(of_tokens(tokens))


def check_chain(recipe: Any, chain: int) -> None:
    """Raise ValueError, with the key, if a round is to draft more tokens than drafts of this recipe have."""
    longest = getattr(settings_of(recipe.method.name), "longest_chain", None)
    if longest is not None and chain > longest(recipe):
        told = f"drafts of this recipe have at most {longest(recipe)} tokens; ask for no more"
        raise ValueError(f"evaluation.shapes: {chain}: {told}")


def published_method(config: dict[str, Any]) -> str | None:
    """Return the method of drafts that others publish with this config.json (PUBLISHED in its settings); None: unknown."""
    known = {name: getattr(settings_of(name), "PUBLISHED", None) for name in names()}
    return next((name for name, part in known.items() if part is not None and part in str(config.get("architectures"))), None)


def method_of_file() -> str:
    """Return the method whose published weight files have no configuration."""
    return next(name for name in names() if settings_of(name).NAMELESS_FILES)


def method_of(recipe: Any, vocabulary: DraftVocabulary | None = None) -> tuple["Method", Any]:
    """Return a recipe's method and its settings; these hold the draft vocabulary if the method's drafts have their own.

    A vocabulary that is only chosen for decoding is not part of the settings: see drafter.
    """
    name = recipe.method.name
    settings = settings_of(name)
    own = vocabulary is not None and has_own_vocabulary(name)
    return method(name), settings.of(recipe, vocabulary) if own else settings.of(recipe)


def drafter(name: str, target: Any, layer: Any, settings: Any, vocabulary: DraftVocabulary | None = None) -> "Drafter":
    """Return the drafter that decodes with a method's layer and its target.

    vocabulary: the tokens to propose; ignored if the method's drafts have their own, which the settings hold.
    """
    return import_module(f"longspec.methods.{name}.drafter").drafter(
        target, layer, settings, None if has_own_vocabulary(name) else vocabulary
    )


def vocabulary_size(recipe: Any) -> int | None:
    """Return the number of target tokens a recipe's draft can propose; None: all, so no vocabulary is counted."""
    return getattr(recipe.method, "vocabulary", None)


def vocabulary_lender(recipe: Any) -> str | None:
    """Return the run whose draft vocabulary a recipe takes over; None: it is counted on the run's own rows."""
    return getattr(recipe.method, "vocabulary_from", None)


def vocabulary_for(recipe: Any, path: Path | None) -> DraftVocabulary | None:
    """Return a recipe's draft vocabulary, read from its file; None: the draft proposes all tokens.

    Raises ValueError if the file is missing, unwanted or of another size.
    """
    size = vocabulary_size(recipe)
    if size is None and path is not None:
        raise ValueError(f"{path}: this recipe's draft proposes all of the target's tokens; leave the draft vocabulary out")
    if size is None:
        return None
    if path is None:
        raise ValueError(
            f"draft vocabulary: missing; recipe.method.vocabulary is {size}: give draft_vocabulary_{size}.json by "
            "--vocabulary, or by files.vocabulary= where an experiment is named"
        )
    found = read_draft_vocabulary(path)
    if len(found.ids) != size:
        raise ValueError(f"{path}: ids: are {len(found.ids)}, recipe.method.vocabulary is {size}; count it again")
    return found


def has_own_vocabulary(name: str) -> bool:
    """Tell whether a method's drafts are trained for a vocabulary of their own, so that decoding cannot choose one."""
    return any(field.name == "vocabulary" for field in fields(settings_of(name).Method))


def chosen_vocabulary(name: str, path: Path | None) -> DraftVocabulary | None:
    """Return the draft vocabulary that decoding chooses for a draft of this method; None: all tokens.

    Raises ValueError if the method's drafts have their own vocabulary.
    """
    if path is None:
        return None
    if has_own_vocabulary(name):
        raise ValueError(f"draft_vocabulary: {path}: the head of a draft of {name} has its own tokens; leave it out")
    return read_draft_vocabulary(path)


def decoded_vocabulary(recipe: Any, path: Path | None) -> DraftVocabulary | None:
    """Return the draft vocabulary that a recipe's draft decodes with, its own or one chosen for decoding; None: all tokens."""
    name = recipe.method.name
    return vocabulary_for(recipe, path) if has_own_vocabulary(name) else chosen_vocabulary(name, path)


def soft_labels(recipe: Any) -> bool:
    """Tell whether a recipe's draft learns the target's distribution, not the text's tokens alone."""
    return bool(settings_of(recipe.method.name).soft_labels(recipe))


def loss_weight(recipe: Any) -> float | None:
    """Return a token's weight in a recipe's training loss, summed over steps or slots; None: the loss is not in nats."""
    return settings_of(recipe.method.name).loss_weight(recipe)


def measures_target(recipe: Any, runtime: Any) -> bool:
    """Tell whether training measures the target's own loss: it is asked for, and the states that are read allow it.

    States stored for hard labels hold no final hidden state.
    """
    return bool(runtime.log_target_loss and (recipe.states.source == "online" or soft_labels(recipe)))


def of_target(target: str) -> tuple[str, str]:
    """Return method and model type of a published `_target_`. Raises ValueError, naming the known ones, for an unknown one."""
    known = {path: (name, model_type) for name in names() for model_type, path in settings_of(name).TARGETS.items()}
    if target not in known:
        raise ValueError(f"recipe.model._target_: {target!r} is unknown; known are {', '.join(dict.fromkeys(known))}")
    return known[target]


def check_drafts_for(name: str, model_type: str, key: str) -> None:
    """Raise ValueError if a method has no drafts for a family of targets, with the reason and the methods that have."""
    own = settings_of(name)
    if model_type in own.FAMILIES:
        return
    others = [each for each in names() if model_type in settings_of(each).FAMILIES]
    raise ValueError(
        f"{key}: the method {name} has no drafts for {model_type} targets: {own.WHY_THESE}; it takes "
        f"{', '.join(own.FAMILIES)}{f'; for {model_type} choose the method ' * bool(others)}{' or '.join(others)}"
    )


def check_family_named(recipe: Any, model_type: str, path: str) -> None:
    """Raise ValueError if a target's model type is not the one a typed recipe names, as family or by its class, or if the
    recipe's method has no drafts for it.
    """
    check_drafts_for(recipe.method.name, model_type, f"{path}: config.json")
    model = recipe.model
    if model._target_ is None:
        wanted, own, value = "recipe.model.family", model_type, model.family
    else:
        wanted, own, value = "recipe.model._target_", settings_of(recipe.method.name).TARGETS.get(model_type), model._target_
    if value != own:
        raise ValueError(f"{path}: config.json: model_type is {model_type!r}, {wanted} is {value}; set it to {own}")
