"""A run's file: its target, method and stages, what it sets otherwise than the groups of config/, and what follows from it.

Pydantic reads and checks it; compose.py hands it to Hydra, below a stage's own numbers and above all groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from longspec import methods
from longspec.config import yaml_files
from longspec.config.faults import check, did_you_mean, faults_in
from longspec.config.names import BASELINES, IMPORTED, WITH_LOOKUP, checked_name, readable_name
from longspec.config.target_facts import NotKnownError, TargetFacts, facts_of
from longspec.config.typed import Keys, Once, Text, sections, words

FOLDER = "run"
SUFFIX = ".yaml"
TRAIN = "train"  # the stage of a run with one data set; its numbers are also those of a stage that has no file
CONFIG_DIR = Path(__file__).resolve().parents[3] / "config"
TAKEN = (*BASELINES, IMPORTED, WITH_LOOKUP)  # drafters that no stage trains
WHOLE = ("name", "replay", "regenerate")  # keys of data whose mappings are replaced as a whole
Section = dict[str, Any]
OfRecipe = Annotated[Section, sections("model", "data", "data.replay", "method", "draft", "optimizer", "states")]
OfRuntime = Annotated[Section, sections("deepspeed")]


class StageFile(Keys):
    """Hold what a run sets for one stage: the numbers it begins with, its data, its recipe and runtime."""

    like: Text | None = Field(
        None, description="the file of config/stage/ that it begins with; null: of its own name, or train"
    )
    data: Text | dict[str, Any] | None = Field(
        None, description="the data set that it trains on, or several with their shares; in place of recipe.data.name"
    )
    recipe: OfRecipe = Field({}, description="what decides its weights")
    runtime: OfRuntime = Field({}, description="how it is trained")


class RunFile(Keys):
    """A run's file, with what it has of the run that it derives from."""

    base: Text | None = Field(None, description="the run that it derives from: a name, or a path")
    target: Text | None = Field(None, description="hf:<owner>/<repository>, a folder, a .gguf file, or a file of config/model/")
    data: dict[str, Any] = Field(
        {}, description="its data sets by name: files, hf:<name>, or an entry as in config/workflow.yaml"
    )
    method: Text | None = Field(None, description="a file of config/method/; null: the one that config/train.yaml names")
    deepspeed: Text | None = Field(None, description="a file of config/deepspeed/, in place of the stages' own")
    variants: Annotated[list[Text], Once] = Field(
        [], description="the variants in which it is trained; none: the method's, or those of config/workflow.yaml"
    )
    stages: dict[str, StageFile] = Field(
        {},
        title="a mapping from names to what they set, or a list of names",
        description="its stages by name, in order; a list where they have no numbers of their own",
    )
    final: Annotated[str, words("best", "last")] = Field(
        "best", description="the published stage: chosen by acceptance, or the last"
    )
    recipe: OfRecipe = Field({}, description="what decides the weights, of all stages")
    runtime: OfRuntime = Field({}, description="how all stages are trained")
    build: Section = Field({}, description="a target that is built here")
    evaluation: Section = Field(
        {}, description="how its drafts are measured; each key stands in place of that of config/workflow.yaml"
    )
    gates: Section = Field({}, description="how good its draft must be, likewise")

    @field_validator("stages", mode="before")
    @classmethod
    def _named(cls, stages: Any) -> Any:
        """Take a list of names as a mapping of nothing, and refuse names that no stage may have."""
        if isinstance(stages, list) and all(isinstance(name, str) for name in stages):
            if len(set(stages)) < len(stages):
                raise ValueError(f"must name each stage once; is {stages}")
            stages = dict.fromkeys(stages)
        if not isinstance(stages, dict):
            return stages
        for name in stages:
            if checked_name(name, key="a stage") in TAKEN:
                raise ValueError(f"{name}: {', '.join(TAKEN)} are drafters that no stage trains; give the stage another name")
        return {name: own or {} for name, own in stages.items()}


@dataclass(frozen=True)
class Run:
    """Hold a run's name, the path of its file, and all that the file says."""

    name: str
    path: Path
    says: RunFile

    @property
    def file(self) -> str:
        """Return the file as messages name it."""
        return shown(self.path)

    @property
    def given(self) -> str:
        """Return the run as commands take it."""
        return self.name if is_ours(self.path) else str(self.path)


@cache
def default_method() -> str:
    """Return the method that config/train.yaml has for a run that names none."""
    defaults = yaml_files.read(CONFIG_DIR / "train.yaml")["defaults"]
    return next(str(each["method"]) for each in defaults if isinstance(each, dict) and "method" in each)


def is_ours(path: Path) -> bool:
    """Tell whether a run's file lies in config/run/, so that its name alone will do."""
    return path.absolute().parent.parts[-2:] == ("config", FOLDER)


def shown(path: Path) -> str:
    """Return a run's file as messages name it."""
    return f"config/{FOLDER}/{path.name}" if is_ours(path) else str(path)


def read_run(run: str, folders: Sequence[Path]) -> Run:
    """Return a run by its name, a file of run/ in one of the folders, or by a path that ends in .yaml.

    A run with one data set and no stages gets one stage, `train`. Raises ValueError with the file, the key and what is allowed.
    """
    path, content = _derived(run, folders, [])
    says = _checked(path, _with_train(content))
    if says.data and not says.stages:
        told = ", ".join(f"{name}: {{data: {name}}}" for name in says.data)
        mix = ", ".join(f"{name}: {1 / len(says.data):.4f}" for name in says.data)
        raise ValueError(
            f"{shown(path)}: stages: missing; train on one data set after the other, stages: {{{told}}}, or on a mix, "
            f"stages: {{{TRAIN}: {{data: {{{mix}}}}}}}"
        )
    return Run(path.stem, path, says)


def _with_train(content: Section) -> Section:
    """Return a run's content, with the stage of a run that has one data set and names no stage."""
    data = content.get("data") or ()
    return content if content.get("stages") or len(data) != 1 else content | {"stages": {TRAIN: {"data": next(iter(data))}}}


def name_of(run: str) -> str:
    """Return the name of a run that is given by name or by its file's path."""
    return Path(run).stem if run.endswith(SUFFIX) else run


def path_of(run: str, folders: Sequence[Path], beside: Path | None = None) -> Path:
    """Return a run's file. beside: a folder of runs to look into first. Raises ValueError if there is none."""
    if run.endswith(SUFFIX):
        path = Path(run).expanduser()
        if not path.is_file():
            raise ValueError(f"{run}: no such file (seen from {Path.cwd()}); correct the path")
        checked_name(path.stem, key=f"{run}: a run has its file's name")
        return path
    checked_name(run, key="a run")
    places = [*([] if beside is None else [beside]), *(folder / FOLDER for folder in folders)]
    for place in places:
        if (path := place / f"{run}{SUFFIX}").is_file():
            return path
    known = {path.stem for place in places for path in place.glob(f"*{SUFFIX}")}
    here = f"{run}{SUFFIX} is here: give it with its ending; " if Path(f"{run}{SUFFIX}").is_file() else ""
    raise ValueError(f"there is no config/{FOLDER}/{run}{SUFFIX}; {here}{did_you_mean(run, known)}")


def _derived(run: str, folders: Sequence[Path], passed: list[Path]) -> tuple[Path, Section]:
    """Return a run's file, and its content laid over that of its base. passed: the files that derive from it."""
    path = path_of(run, folders, passed[-1].parent if passed else None)
    if path in passed:
        raise ValueError(f"{' -> '.join(each.stem for each in [*passed, path])} leads back; derive from another, or from none")
    own = yaml_files.read(path)
    own = {} if own is None else own
    base = _checked(path, own).base
    if base is None:
        return path, own
    try:
        _, beneath = _derived(base, folders, [*passed, path])
    except ValueError as error:
        raise ValueError(f"{shown(path)}: base: {error}") from None
    return path, _over(beneath, own)


def _over(beneath: Section, own: Section) -> Section:
    """Lay a run's keys over those of its base: mappings key by key, mixes and all else as a whole.

    If the base has another method, its recipe.method, recipe.draft and variants are left out; if another target, recipe.model
    and build; if the run names a file of config/deepspeed/, runtime.deepspeed.
    The stages are those that the run names. What it says of one, or of all, replaces what its base says of one.
    """
    beneath = _with_train(beneath)
    stages = {name: dict(numbers or {}) for name, numbers in _mapping(beneath.get("stages")).items()}
    left_out = {"model", "build"} if own.get("target", beneath.get("target")) != beneath.get("target") else set()
    left_out |= {"deepspeed"} if own.get("deepspeed") else set()
    if own.get("method", method := beneath.get("method", default_method())) != method:
        left_out |= {"method", "draft", "variants"}
    beneath = {key: value for key, value in beneath.items() if key not in left_out - {"method"}}
    for section, part in product((beneath, *stages.values()), ("recipe", "runtime")):
        section[part] = {key: value for key, value in (section.get(part) or {}).items() if key not in left_out}
    of_all: Section = {key: own[key] for key in ("recipe", "runtime") if key in own}
    stages = {name: _of_stage(numbers, of_all) for name, numbers in stages.items()}
    named = _mapping(own.get("stages", list(stages)))
    merged = {name: _of_stage(stages.get(name, {}), numbers or {}) for name, numbers in named.items()}
    return _merged(beneath, own) | {"stages": merged}


def _of_stage(beneath: Section, own: Section) -> Section:
    """Lay what a run says of one stage or of all over what its base says of one; `data` and `recipe.data.name` are one key."""
    said = own.get("recipe", {}).get("data", {}).get("name")
    data = own.get("data", said if "data" in beneath else None)
    return _merged(beneath, own) | ({} if data is None else {"data": data})


def _mapping(stages: Any) -> Section:
    """Return stages by name; a list of names becomes a mapping to None."""
    return dict.fromkeys(stages or ()) if isinstance(stages, list) else dict(stages or {})


def _merged(beneath: Section, own: Section) -> Section:
    merged = dict(beneath)
    for key, value in own.items():
        below, is_section = merged.get(key), isinstance(value, dict) and key not in WHOLE
        merged[key] = _merged(below, value) if is_section and isinstance(below, dict) else value
    return merged


def _checked(path: Path, content: Any) -> RunFile:
    """Return the typed content. Raises ValueError, with a line for each fault."""
    if not isinstance(content, dict):
        raise ValueError(f"{shown(path)}: must be a mapping with keys such as target and stages at its top level")
    with faults_in(shown(path)):
        check(RunFile, content)
    return RunFile.model_validate(content)


def source_of(run: Run, folders: Sequence[Path]) -> str | None:
    """Return where a run's target comes from; None if it is a file of config/model/, or if the run names none."""
    target = run.says.target
    is_file = any((folder / f"model/{target}.yaml").is_file() for folder in folders)
    return None if is_file else target


def target_of(run: Run, folders: Sequence[Path]) -> tuple[TargetFacts | None, Section | None]:
    """Return the facts of a run's target and its section recipe.model; None, None for a file of config/model/, or no target.

    Raises ValueError, with the run's file, if nothing is known of the target and the run does not say its family.
    """
    target = source_of(run, folders)
    if target is None:
        return None, None
    family = run.says.recipe.get("model", {}).get("family")
    with faults_in(run.file):
        try:
            facts = facts_of(target, run.path)
        except NotKnownError as error:
            if family is None:
                raise ValueError(f"{error}, or say its family: recipe: {{model: {{family: llama}}}}") from None
            facts = TargetFacts(target, family, None, None, None)
    return facts, {"name": readable_name(target), "source": target, "family": facts.family}


def variants_of(run: Run) -> list[str]:
    """Return the variants that a run names, else its method's own; [] if config/workflow.yaml says them."""
    method = run.says.method
    return run.says.variants or ([] if method is None else list(methods.settings_of(method).VARIANTS))


def with_implied(run: Run, facts: TargetFacts | None, model: Section | None) -> Section:
    """Return a run's section recipe, laid over what its target and its method imply."""
    implied: Section = {} if model is None else {"model": model}
    if facts is not None and facts.tokens is not None:
        implied |= {"method": methods.implied(run.says.method or default_method(), facts.tokens)}
    return _merged(implied, run.says.recipe)


def numbers_of(run: Run, stage: str, folders: Sequence[Path]) -> str:
    """Return the file of config/stage/ that a stage begins with: the one it names, the one of its own name, or `train`."""
    own = any((folder / f"stage/{stage}.yaml").is_file() for folder in folders)
    says = run.says.stages[stage]
    return says.like or (stage if own or says.data is None else TRAIN)


def stage_of(run: Run, stage: str, facts: TargetFacts | None, folders: Sequence[Path]) -> Section:
    """Return the sections that a run sets for a stage. Rows of `train` are no longer than the target's positions."""
    says = run.says.stages[stage]
    data: Section = {}
    is_said = "sequence_length" in run.says.recipe.get("data", {})
    if facts is not None and facts.positions is not None and numbers_of(run, stage, folders) == TRAIN and not is_said:
        files = (folder / f"stage/{TRAIN}.yaml" for folder in folders)
        numbers = yaml_files.read(next(path for path in files if path.is_file()))
        data["sequence_length"] = min(facts.positions, numbers["recipe"]["data"]["sequence_length"])
    recipe = _merged({"stage": stage, "data": data}, says.recipe)
    recipe["data"] |= {} if says.data is None else {"name": says.data}
    return {"recipe": recipe, "runtime": says.runtime}
