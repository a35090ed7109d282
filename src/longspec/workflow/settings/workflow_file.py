"""Check config/workflow.yaml: its text, before Snakemake reads it, and its keys' types."""

import copy
import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, Field

from longspec.answers.settings import Regenerate
from longspec.config import yaml_files
from longspec.config.faults import wrong_places
from longspec.config.names import IS_NAME, is_name
from longspec.config.run_file import SUFFIX
from longspec.config.typed import Filled, Flag, Keys, Name, Number, Once, Seed, Share, Text, Whole, left_out, words
from longspec.measure.section import Evaluation

TEMPLATED = "__use_yte__"  # makes Snakemake run the file's values as Python
SOURCE = "stdlib, puzzles, questions, a file, a glob, a list of files, or hf:<owner>/<repository>[:config][:split]"


def _run(text: str) -> str:
    if not (text.endswith(SUFFIX) or is_name(text)):
        raise ValueError(f"{text!r} is no name; a name has {IS_NAME}; or give a path that ends in {SUFFIX}")
    return text


def _of_json(value: Any) -> Any:
    """Return the value. Raises ValueError if YAML allows it but a manifest cannot hold it."""
    with suppress(TypeError, ValueError):
        if json.loads(json.dumps(value, allow_nan=False)) == value:
            return value
    raise ValueError("holds a date, a key that is no text, or a number that is none; put it in quotes")


Step = Annotated[
    dict[Text, Annotated[Any, AfterValidator(_of_json)]],
    Field(min_length=1, max_length=1, title="a mapping of one aligner to its settings"),
]
RunName = Annotated[Text, AfterValidator(_run), Field(title=f"a name, or a path that ends in {SUFFIX}")]


class Dataset(Keys):
    """Hold one data set. Which keys its source knows, and their defaults: longspec.data.raw."""

    source: Filled | Annotated[list[Filled], Field(min_length=1)] = Field(
        title=SOURCE, description="where its records come from"
    )
    preset: Text = left_out("a name in config/data.yaml")
    revision: Filled = left_out("a branch, tag or commit of a dataset on the hub, in quotes if it reads like a number")
    shards: Annotated[Whole, Field(ge=1, le=1000)] = Field(description="the number of files it is tokenized into")
    held_out: Annotated[Number, Field(gt=0, lt=1)] = left_out("the share of records kept for evaluation, for instance 0.02")
    held_out_by: Text = left_out("a field of the source: records of one value are held out together, for instance problem")
    align: list[Step] = left_out(
        "a list of steps, each one aligner with its settings, for instance [{rename: {question: problem}}]"
    )
    max_rejected: Share = left_out("the share of rejected records above which the job fails, for instance 0.01")
    max_line_mb: Annotated[Number, Field(gt=0, le=10**6)] = left_out(
        "the length in megabytes above which a line is rejected unread"
    )
    min_characters: Annotated[Whole, Field(ge=0, le=10**9)] = left_out("the length below which a document is left out")
    max_characters: Annotated[Whole, Field(ge=1, le=10**9)] = left_out("the length above which a question is left out")
    as_: Annotated[str, words("code")] = left_out('the `source` field of the records: "code", or left out', alias="as")
    records: Annotated[Whole, Field(ge=1, le=10**9)] = left_out("the number of records to generate")
    seed: Seed = left_out("the seed of random draws")
    regenerate: Regenerate | None = Field(
        None, description="how the target itself answers the records' questions, or null: they keep their answers"
    )


class Gates(Keys):
    """Say how good a draft must be. Where it is not `snakemake final_draft` fails, after the report."""

    forgetting: Share | None = Field(
        description="the share of the acceptance length that a stage may lose on the data of earlier stages; null: no gate"
    )
    context: Share | None = Field(
        description="the share of the acceptance length that the final draft may lose from a task's shortest contexts to its "
        "longest; null: no gate"
    )


class WorkflowFile(Keys):
    """Hold config/workflow.yaml: what to build from which data, and how it is measured."""

    runs: Annotated[list[RunName], Field(min_length=1), Once] = Field(
        description="a list of files of config/run/, for instance [demo], or of paths that end in .yaml"
    )
    variants: Annotated[list[Name], Field(min_length=1), Once] = Field(
        description="a list of files of config/variant/, for runs that name none, for instance [sinkpi-slicing]"
    )
    keep_states: Flag = Field(False, description="whether stored states stay on the disk when no stage needs them")
    data: dict[Name, Dataset] = Field(description="a mapping from dataset names to {source, shards, ...}")
    evaluation: Evaluation = Field(description="how drafts are measured, where a run's own file says nothing else")
    gates: Gates = Field(description="how good a draft must be, where a run's own file says nothing else")


def check_text(path: Path) -> None:
    """Raise ValueError, with the line, if Snakemake would misread a file: no UTF-8, no YAML, or a key that occurs twice."""
    content = yaml_files.read(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must be a mapping with keys such as runs and data at its top level")
    if TEMPLATED in content:
        raise ValueError(f"{path}: {TEMPLATED}: a configuration holds values and runs no code; remove the key")


def typed_call(values: dict[str, Any]) -> dict[str, Any]:
    """Return values of --config, with text replaced by a number, true, false or null where text is wrong and it reads as one.

    Inside braces and brackets Snakemake reads every value as text.
    """
    typed = copy.deepcopy(values)
    for *above, last in wrong_places(WorkflowFile, values):
        section: Any = typed
        for part in above:
            section = section[part]
        section[last] = _scalars(section[last])
    return typed


def _scalars(value: Any) -> Any:
    """Return text, or the texts of a list, as YAML reads it, if that is a number, true, false or null."""
    if isinstance(value, list):
        return [_scalars(each) for each in value]
    try:
        read = yaml.safe_load(value) if isinstance(value, str) else value
    except yaml.YAMLError:
        return value
    return read if read is None or isinstance(read, int | float) else value
