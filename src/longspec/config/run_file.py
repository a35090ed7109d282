"""A run's file: which target, method and stages, and what is set otherwise than in the groups of config/.

Read and checked by pydantic; compose.py hands it to Hydra, below a stage's own numbers and above all groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from longspec.config import yaml_files
from longspec.config.explain import did_you_mean, faults_in
from longspec.config.faults import check
from longspec.config.names import BASELINES, IMPORTED, WITH_LOOKUP, check_name
from longspec.config.typed import Keys, Once, Text, words

FOLDER = "run"
SUFFIX = ".yaml"
TRAIN = "train"  # the stage of a run with one data set, and the numbers of a stage that has no file
CONFIG_DIR = Path(__file__).resolve().parents[3] / "config"
TAKEN = (*BASELINES, IMPORTED, WITH_LOOKUP)  # drafters that no stage trains
Section = dict[str, Any]


class StageFile(Keys):
    """Hold what a run sets for one stage: the numbers it begins with, its data, its recipe and runtime."""

    like: Text | None = Field(
        None, description="the file of config/stage/ that it begins with; null: of its own name, or train"
    )
    data: Text | None = Field(None, description="the data set that it trains on; in place of recipe.data.name")
    train_on: Annotated[str, words("answers", "all")] | None = Field(
        None, description="what is trained: answers alone, or all tokens; null: as the stage's file says"
    )
    recipe: Section = Field({}, description="what decides its weights")
    runtime: Section = Field({}, description="how it is trained")


class RunFile(Keys):
    """A run's file, with what it has of the run that it derives from."""

    base: Text | None = Field(None, description="the run that it derives from: a name, or a path")
    target: Text | None = Field(None, description="hf:<owner>/<repository>, a folder, a .gguf file, or a file of config/model/")
    data: dict[str, Any] = Field(
        {}, description="its data sets by name: files, hf:<name>, or an entry as in config/workflow.yaml"
    )
    method: Text | None = Field(None, description="a file of config/method/")
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
    recipe: Section = Field({}, description="what decides the weights, of all stages")
    runtime: Section = Field({}, description="how all stages are trained")
    build: Section = Field({}, description="a target that is built here")
    evaluation: Section = Field(
        {}, description="how its drafts are measured; each key stands in place of that of config/workflow.yaml"
    )
    gates: Section = Field({}, description="how good its draft must be, likewise")

    @field_validator("stages", mode="before")
    @classmethod
    def _named(cls, stages: Any) -> Any:
        """A list names stages without numbers, as a mapping of nothing does."""
        if isinstance(stages, list):
            if len(set(map(str, stages))) < len(stages):
                raise ValueError(f"must name each stage once; is {stages}")
            stages = dict.fromkeys(stages)
        return {name: own or {} for name, own in stages.items()} if isinstance(stages, dict) else stages

    @field_validator("stages")
    @classmethod
    def _free(cls, stages: dict[str, StageFile]) -> dict[str, StageFile]:
        for name in stages:
            check_name("a stage", name)
            if name in TAKEN:
                raise ValueError(f"{name}: {', '.join(TAKEN)} are drafters that no stage trains; give the stage another name")
        return stages


@dataclass(frozen=True)
class Run:
    """A run by its name, the path of its file, and all that it says."""

    given: str  # its name, or its file's path
    name: str
    path: Path
    says: RunFile

    @property
    def file(self) -> str:
        """The file as messages name it."""
        return shown(self.path)


@cache
def default_method() -> str:
    """The method of a run that names none, as config/train.yaml has it."""
    defaults = yaml_files.read(CONFIG_DIR / "train.yaml")["defaults"]
    return next(str(each["method"]) for each in defaults if isinstance(each, dict) and "method" in each)


def shown(path: Path) -> str:
    """A run's file as messages name it."""
    return f"config/{FOLDER}/{path.name}" if path.parent.name == FOLDER else str(path)


def read_run(run: str, folders: Sequence[Path]) -> Run:
    """A run by its name, of a file of run/ in one of the folders, or by a path that ends in .yaml.

    Raises ValueError with the file, the key and what is allowed.
    """
    path, content = _derived(run, folders, [])
    return Run(run, path.stem, path, _with_stages(path, _checked(path, content)))


def path_of(run: str, folders: Sequence[Path], beside: Path | None = None) -> Path:
    """The file of a run. beside: a folder of runs that is looked into first. Raises ValueError where there is none."""
    if run.endswith(SUFFIX):
        path = Path(run).expanduser()
        if not path.is_file():
            raise ValueError(f"{run}: no such file (seen from {Path.cwd()}); correct the path")
        check_name(f"{run}: a run has its file's name, and", path.stem)
        return path
    check_name("a run", run)
    places = [*([] if beside is None else [beside]), *(folder / FOLDER for folder in folders)]
    for place in places:
        if (path := place / f"{run}{SUFFIX}").is_file():
            return path
    known = [path.stem for folder in folders for path in (folder / FOLDER).glob(f"*{SUFFIX}")]
    raise ValueError(f"there is no config/{FOLDER}/{run}{SUFFIX}; {did_you_mean(run, set(known))}")


def _derived(run: str, folders: Sequence[Path], passed: list[Path]) -> tuple[Path, Section]:
    """The file of a run, and its content over that of the run that it derives from. passed: files that derive from it."""
    path = path_of(run, folders, passed[-1].parent if passed else None)
    if path in passed:
        raise ValueError(
            f"{' -> '.join(each.stem for each in [*passed, path])} leads back; derive from another run, or from none"
        )
    own = yaml_files.read(path)
    own = {} if own is None else own
    _checked(path, own)
    base = own.get("base")
    if base is None:
        return path, own
    try:
        _, beneath = _derived(base, folders, [*passed, path])
    except ValueError as error:
        raise ValueError(f"{shown(path)}: base: {error}") from None
    return path, _over(beneath, own)


def _with_stages(path: Path, says: RunFile) -> RunFile:
    """With one data set and no stage the run has one, `train`. Raises ValueError where several data sets name no stages."""
    if says.stages or not says.data:
        return says
    if len(says.data) > 1:
        told = ", ".join(f"{name}: {{data: {name}}}" for name in says.data)
        raise ValueError(f"{shown(path)}: stages: missing; a stage trains on one data set: stages: {{{told}}}")
    return says.model_copy(update={"stages": {TRAIN: StageFile.model_validate({"data": next(iter(says.data))})}})


def _over(beneath: Section, own: Section) -> Section:
    """A run's keys over those of its base: mappings key by key, all else as a whole.

    Of a base with another method the keys of recipe.method and recipe.draft are left out, which are that method's. Stages are
    those that the run names, each with the base's numbers beneath its own.
    """
    stages = {name: dict(numbers or {}) for name, numbers in _mapping(beneath.get("stages")).items()}
    if own.get("method", method := beneath.get("method", default_method())) != method:
        beneath = beneath | {"recipe": _without_method(beneath.get("recipe"))}
        stages = {name: numbers | {"recipe": _without_method(numbers.get("recipe"))} for name, numbers in stages.items()}
    named = _mapping(own.get("stages", stages))
    merged = {name: _merged(stages.get(name, {}), numbers or {}) for name, numbers in named.items()}
    return _merged(beneath, own) | {"stages": merged}


def _mapping(stages: Any) -> Section:
    """Stages by name, also of a list of names."""
    return dict.fromkeys(stages or ()) if isinstance(stages, list) else dict(stages or {})


def _without_method(recipe: Any) -> Section:
    return {key: value for key, value in (recipe or {}).items() if key not in ("method", "draft")}


def _merged(beneath: Mapping[str, Any], own: Mapping[str, Any]) -> Section:
    merged = dict(beneath)
    for key, value in own.items():
        below = merged.get(key)
        merged[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _checked(path: Path, content: Any) -> RunFile:
    """The typed content. Raises ValueError with a line for each fault."""
    if not isinstance(content, dict):
        raise ValueError(f"{shown(path)}: must be a mapping with keys such as target and stages at its top level")
    with faults_in(shown(path)):
        check(RunFile, content)
    return RunFile.model_validate(content)
