"""Draft methods by name. What each must answer: contract.py. No torch here: runs are planned with the names and settings."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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


def method_of(recipe: Any) -> tuple["Method", Any]:
    """The method that a recipe chooses, and its settings."""
    name = recipe.method.name
    return method(name), settings_of(name).of(recipe)


def soft_labels(recipe: Any) -> bool:
    """Whether a recipe's draft learns the target's distribution, and not the text's tokens alone."""
    return bool(settings_of(recipe.method.name).soft_labels(recipe))


def of_target(target: str) -> tuple[str, str]:
    """Method and model type that a published `_target_` stands for. Raises ValueError, naming the known ones."""
    known = {path: (name, model_type) for name in names() for model_type, path in settings_of(name).TARGETS.items()}
    if target not in known:
        raise ValueError(f"recipe.model._target_: {target!r} is unknown; known are {', '.join(dict.fromkeys(known))}")
    return known[target]


def of_nameless_files() -> str:
    """The method whose weights were published as files without a configuration."""
    return next(name for name in names() if settings_of(name).NAMELESS_FILES)


def check_family_named(recipe: Any, model_type: str, path: str) -> None:
    """Raise ValueError when a target's model type is not the one that a typed recipe names, as family or by its class."""
    model = recipe.model
    if model._target_ is None:
        wanted, own, value = "recipe.model.family", model_type, model.family
    else:
        wanted, own, value = "recipe.model._target_", settings_of(recipe.method.name).TARGETS.get(model_type), model._target_
    if value != own:
        raise ValueError(f"{path}: config.json: model_type is {model_type!r}, {wanted} is {value}; set it to {own}")
