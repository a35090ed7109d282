"""Files generated from the keys' types: docs/configuration.md, and the JSON Schema of a run's file, for editors.

python -m longspec.workflow.reference            writes them
python -m longspec.workflow.reference --check    fails, with their names, where they are not of today
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Set
from copy import deepcopy
from itertools import chain

from longspec import methods
from longspec.config import Build, Recipe, Runtime
from longspec.config.faults import Node, allowed, schema_of, shown
from longspec.config.run_file import CONFIG_DIR, RunFile
from longspec.measure.section import Evaluation
from longspec.workflow.settings.workflow_file import Dataset, Gates, WorkflowFile

RUN, PAGE = "config/run.schema.json", "docs/configuration.md"
REF = "#/$defs/"
SECTIONS = {"recipe", "runtime", "build", "evaluation", "gates"}  # keys of a run's file that hold a section
PARTS = ("Method", "Draft")  # of a recipe, typed by the method's settings
ESCAPED = r"\<"  # else Markdown reads <owner> as a tag
HEAD = """# All keys

```bash
longspec plan mine.yaml                # prints each wrong key and what is allowed
```

`python -m longspec.workflow.reference` makes this page from the types in the source, and a JSON Schema, by which editors
complete and check a run's file. `longspec new` writes the first line that VS Code's YAML extension wants:
`# yaml-language-server: $schema=/path/to/longspec/config/run.schema.json`.

One file is a whole run: [own-model.md](own-model.md). `config/workflow.yaml` holds what all runs share.

The column `default` shows the type's default. A stage begins with a file of `config/stage/`, whose values override it: a run
with one data set begins with `config/stage/train.yaml`. Where the column is empty for `evaluation` and `gates`,
`config/workflow.yaml` has the default.
"""


def run_schema() -> Node:
    """Return the JSON Schema of a run's file, including its sections' schemas."""
    run = deepcopy(schema_of(RunFile))
    known = run["$defs"]
    kinds = {kind.__name__: kind for kind in (Recipe, Runtime, Build, Evaluation, Gates, Dataset)}
    kinds |= {f"{part} {name}": getattr(methods.settings_of(name), part) for part in PARTS for name in methods.names()}
    for name, kind in kinds.items():
        known[name] = deepcopy(schema_of(kind))
        known.update(known[name].pop("$defs", {}))
    for part in PARTS:
        known["Recipe"]["properties"][part.lower()] = {"anyOf": [{"$ref": f"{REF}{part} {name}"} for name in methods.names()]}
    for name in ("Evaluation", "Gates", "Dataset"):  # they override keys of other files, so none is required
        known[name].pop("required", None)
    for keys in (run["properties"], known["StageFile"]["properties"]):
        for key in SECTIONS & keys.keys():
            keys[key] = {"$ref": REF + key.capitalize(), "description": keys[key]["description"]}
    sources = known["Dataset"]["properties"]["source"]["anyOf"]
    run["properties"]["data"]["additionalProperties"] = {"anyOf": [*sources, {"$ref": f"{REF}Dataset"}]}
    stages = run["properties"]["stages"]
    own, names = {"anyOf": [{"$ref": f"{REF}StageFile"}, {"type": "null"}]}, {"type": "array", "items": {"type": "string"}}
    stages = {key: stages[key] for key in ("title", "description")}
    run["properties"]["stages"] = stages | {"anyOf": [{"type": "object", "additionalProperties": own}, names]}
    return run | {"title": "A run of longspec"}


def page() -> str:
    """Return docs/configuration.md: a table of keys for each section."""
    run, workflow = run_schema(), schema_of(WorkflowFile)
    for name in ("Evaluation", "Gates"):
        for key in run["$defs"][name]["properties"].values():
            key.setdefault("default", "")  # config/workflow.yaml has its value

    def table(title: str, name: str, prefix: str = "", closed: Set[str] = frozenset()) -> list[str]:
        return [f"## {title}\n", *_lines(_rows(run["$defs"][name], run, prefix, closed))]

    parts = [HEAD, "## A run's file\n", *_lines(_rows(run, run, "", SECTIONS | {"stages"}))]
    parts += table("A stage: stages.\\<name>.", "StageFile", closed=SECTIONS)
    parts += table("recipe: what decides the weights", "Recipe", "recipe.", {part.lower() for part in PARTS})
    for name in methods.names():
        rows = (_rows(run["$defs"][f"{part} {name}"], run, f"recipe.{part.lower()}.", frozenset()) for part in PARTS)
        parts += [f"## recipe of {name}\n", *_lines(chain.from_iterable(rows))]
    parts += table("runtime: how it is trained", "Runtime", "runtime.")
    parts += table("build: a target of our own", "Build", "build.")
    parts += ["## config/workflow.yaml\n", *_lines(_rows(workflow, workflow, "", SECTIONS | {"data"}))]
    parts += table("data.\\<name>: a data set", "Dataset", closed={"regenerate"})
    parts += table("data.\\<name>.regenerate: answers by the target", "Regenerate")
    parts += table("evaluation: how drafts are measured", "Evaluation", closed={"tasks", "bench"})
    parts += table("evaluation.tasks.\\<name>: what they are measured on", "TaskEntry")
    parts += table("gates: how good a draft must be", "Gates")
    return "\n".join(parts)


def _lines(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return rows as the lines of a Markdown table."""
    lines = ["| key | may be | default | it is |", "| --- | --- | --- | --- |"]
    return [*lines, *(f"| {' | '.join(cell.replace('<', ESCAPED) for cell in row)} |" for row in rows), ""]


def _rows(node: Node, whole: Node, prefix: str, closed: Set[str]) -> Iterator[tuple[str, ...]]:
    """Yield (key, allowed values, default, meaning) for each key; a section's keys replace it unless it is in `closed`."""
    for name, each in node.get("properties", {}).items():
        below = whole["$defs"].get(each.get("$ref", "").removeprefix(REF), {})
        if "properties" in below and name not in closed:
            yield from _rows(below, whole, f"{prefix}{name}.", closed)
            continue
        default = each.get("default", "null" if {"type": "null"} in each.get("anyOf", []) else "")
        text = default if isinstance(default, str) else shown(default)
        told = "" if name in closed or default in ({}, [], "") else f"`{text}`"
        may_be = "a mapping" if name in closed and name != "stages" else allowed(each, whole)
        yield f"`{prefix}{name}`", may_be, told, each.get("description", "the section below" if name in closed else "")


def texts() -> dict[str, str]:
    """Return path from the repository's root -> text, of the generated files."""
    return {RUN: json.dumps(run_schema(), indent=1, sort_keys=True) + "\n", PAGE: page()}


def main(arguments: list[str] | None = None) -> int:
    """Write the files, or check them against today's types."""
    parser = argparse.ArgumentParser(prog="python -m longspec.workflow.reference", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail where a file is not of today")
    check, root, old = parser.parse_args(arguments).check, CONFIG_DIR.parent, []
    for path, text in texts().items():
        if not check:
            (root / path).write_text(text)
        elif not (root / path).is_file() or (root / path).read_text() != text:
            old.append(path)
    if old:
        print(f"{', '.join(old)}: not of today's types; type: python -m longspec.workflow.reference", file=sys.stderr)
    return bool(old)


if __name__ == "__main__":
    sys.exit(main())
