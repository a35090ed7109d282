"""Draft methods by name. What each must answer: contract.py. No torch here: runs are planned with the names and settings."""

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
    """The methods that there are: the folders of this room."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/settings.py"))


def settings_of(name: str) -> Any:
    """A method's settings module. Raises ValueError, naming those that there are, for an unknown one."""
    if name not in names():
        raise ValueError(f"recipe.method.name: {name!r} is unknown; choose one of {', '.join(names())}")
    return import_module(f"longspec.methods.{name}.settings")


def method(name: str) -> "Method":
    """A method by its name. Raises ValueError, naming those that there are, for an unknown one."""
    settings_of(name)
    return import_module(f"longspec.methods.{name}.method").METHOD


def layouts_of(name: str) -> dict[str, Any]:
    """The modules of other programs' layouts that a method can write its draft folders in, by the layouts' names."""
    files = sorted((Path(__file__).parent / name).glob("*_layout.py"))
    return {path.stem.removesuffix("_layout"): import_module(f"longspec.methods.{name}.{path.stem}") for path in files}


def served(name: str, engine: str) -> Served:
    """Return how an engine loads draft folders of a method. Raises ValueError, with the key, where it loads none."""
    found: Served | None = settings_of(name).SERVED.get(engine)
    if found is None:
        others = [each for each in ENGINES if each in settings_of(name).SERVED]
        others = [f"evaluation.engine: {each}" for each in (OURS, *others)]
        raise ValueError(f"evaluation.engine: {engine}: loads no {name} drafts; set {' or '.join(others)}")
    return found


def check_layout(name: str, values: Any, layout: str | None, context: int | None) -> None:
    """Raise ValueError, with the key, for a method's values that a layout cannot represent beside texts of `context` tokens."""
    check = getattr(settings_of(name), "check_layout", None)
    if layout is not None and check is not None:
        check(layout, values, context)


def implied(name: str, tokens: int) -> dict[str, Any]:
    """Return the keys of recipe.method that follow from a target of so many tokens."""
    of_tokens = getattr(settings_of(name), "implied", None)
    return {} if of_tokens is None else dict(of_tokens(tokens))


def check_chain(recipe: Any, chain: int) -> None:
    """Raise ValueError, with the key, for more drafted tokens of a round than an engine can be asked for."""
    longest = getattr(settings_of(recipe.method.name), "longest_chain", None)
    if longest is not None and chain > longest(recipe):
        told = f"drafts of this recipe have at most {longest(recipe)} tokens; ask for no more"
        raise ValueError(f"evaluation.shapes: {chain}: {told}")


def published_method(config: dict[str, Any]) -> str | None:
    """Return the method whose drafts others publish with such a config.json (PUBLISHED of its settings); None: no known one."""
    known = {name: getattr(settings_of(name), "PUBLISHED", None) for name in names()}
    return next((name for name, part in known.items() if part is not None and part in str(config.get("architectures"))), None)


def method_of_file() -> str:
    """Return the method whose published weight files come without a configuration."""
    return next(name for name in names() if settings_of(name).NAMELESS_FILES)


def method_of(recipe: Any, vocabulary: DraftVocabulary | None = None) -> tuple["Method", Any]:
    """The method that a recipe chooses, and its settings; with the draft vocabulary where weights are trained or read.

    A vocabulary that is no more than chosen for decoding is no part of them: see drafter.
    """
    name = recipe.method.name
    settings = settings_of(name)
    own = vocabulary is not None and has_own_vocabulary(name)
    return method(name), settings.of(recipe, vocabulary) if own else settings.of(recipe)


def drafter(name: str, target: Any, layer: Any, settings: Any, vocabulary: DraftVocabulary | None = None) -> "Drafter":
    """The drafter that decodes with a method's layer beside its target.

    vocabulary: the tokens to propose; where the method's drafts have their own these are in the settings already.
    """
    made: Drafter = import_module(f"longspec.methods.{name}.drafter").drafter(
        target, layer, settings, None if has_own_vocabulary(name) else vocabulary
    )
    return made


def vocabulary_size(recipe: Any) -> int | None:
    """How many tokens of the target a recipe's draft can propose; None: all, so that no vocabulary is counted."""
    return getattr(recipe.method, "vocabulary", None)


def vocabulary_lender(recipe: Any) -> str | None:
    """The run whose draft vocabulary a recipe takes over; None where it is counted on the run's own rows."""
    return getattr(recipe.method, "vocabulary_from", None)


def vocabulary_for(recipe: Any, path: Path | None) -> DraftVocabulary | None:
    """The draft vocabulary of a recipe from its file.

    Raises ValueError for one that is missing, unwanted or of another size.
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
    """Whether the tokens that a method's drafts can propose are trained, so that decoding has no choice of them."""
    return any(field.name == "vocabulary" for field in fields(settings_of(name).Method))


def chosen_vocabulary(name: str, path: Path | None) -> DraftVocabulary | None:
    """The draft vocabulary that decoding chooses for a draft of this method; None: all.

    Raises ValueError for a method whose drafts have one of their own.
    """
    if path is None:
        return None
    if has_own_vocabulary(name):
        raise ValueError(f"draft_vocabulary: {path}: the head of a draft of {name} has its own tokens; leave it out")
    return read_draft_vocabulary(path)


def decoded_vocabulary(recipe: Any, path: Path | None) -> DraftVocabulary | None:
    """The draft vocabulary that a recipe's draft decodes with: its own, or the one that is chosen for it; None: all tokens."""
    name = recipe.method.name
    return vocabulary_for(recipe, path) if has_own_vocabulary(name) else chosen_vocabulary(name, path)


def soft_labels(recipe: Any) -> bool:
    """Whether a recipe's draft learns the target's distribution, and not the text's tokens alone."""
    return bool(settings_of(recipe.method.name).soft_labels(recipe))


def loss_weight(recipe: Any) -> float | None:
    """Return what weighs a token in a recipe's training loss, summed over its steps or slots; None: the loss is not in nats."""
    weight: float | None = settings_of(recipe.method.name).loss_weight(recipe)
    return weight


def measures_target(recipe: Any, runtime: Any) -> bool:
    """Whether the target's own loss on the trained rows is measured: asked for, and known from the states that are read.

    Stored ones of hard labels hold no final hidden state.
    """
    return bool(runtime.log_target_loss and (recipe.states.source == "online" or soft_labels(recipe)))


def of_target(target: str) -> tuple[str, str]:
    """Method and model type that a published `_target_` stands for. Raises ValueError, naming the known ones."""
    known = {path: (name, model_type) for name in names() for model_type, path in settings_of(name).TARGETS.items()}
    if target not in known:
        raise ValueError(f"recipe.model._target_: {target!r} is unknown; known are {', '.join(dict.fromkeys(known))}")
    return known[target]


def check_drafts_for(name: str, model_type: str, key: str) -> None:
    """Raise ValueError, with the reason and the methods that do, where a method has no drafts for a family of targets."""
    own = settings_of(name)
    if model_type in own.FAMILIES:
        return
    others = [each for each in names() if model_type in settings_of(each).FAMILIES]
    raise ValueError(
        f"{key}: the method {name} has no drafts for {model_type} targets: {own.WHY_THESE}; it takes "
        f"{', '.join(own.FAMILIES)}{f'; for {model_type} choose the method ' * bool(others)}{' or '.join(others)}"
    )


def check_family_named(recipe: Any, model_type: str, path: str) -> None:
    """Raise ValueError when a target's model type is not the one that a typed recipe names, as family or by its class, or when
    its method has no drafts for it.
    """
    check_drafts_for(recipe.method.name, model_type, f"{path}: config.json")
    model = recipe.model
    if model._target_ is None:
        wanted, own, value = "recipe.model.family", model_type, model.family
    else:
        wanted, own, value = "recipe.model._target_", settings_of(recipe.method.name).TARGETS.get(model_type), model._target_
    if value != own:
        raise ValueError(f"{path}: config.json: model_type is {model_type!r}, {wanted} is {value}; set it to {own}")
