"""Files generated from the keys' types: docs/configuration.md, and two JSON Schemas, by which editors complete and check files.

python -m longspec.workflow.reference            writes them
python -m longspec.workflow.reference --check    fails, with their names, where they are not of today
"""

import argparse
import json
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from longspec import methods
from longspec.config import Build, Recipe, Runtime
from longspec.config.faults import Node, allowed, schema_of, shown
from longspec.config.run_file import CONFIG_DIR, RunFile
from longspec.measure.section import Evaluation
from longspec.workflow.settings.workflow_file import Dataset, Gates, WorkflowFile

RUN, WORKFLOW, PAGE = "config/run.schema.json", "config/workflow.schema.json", "docs/configuration.md"
REF = "#/$defs/"
ESCAPED = r"\<"  # else Markdown takes <owner> for a tag
HEAD = """# All keys

```bash
longspec plan mine                     # a key that is wrong is told here, with what is allowed
```

`python -m longspec.workflow.reference` makes this page from the types in the source. It makes two JSON Schemas too. Editors
complete and check a file by them. `longspec new` writes the first line that VS Code's YAML extension wants:
`# yaml-language-server: $schema=/path/to/longspec/config/run.schema.json`. `config/workflow.yaml` has `workflow.schema.json`.

One file is a whole run: [own-model.md](own-model.md). `config/workflow.yaml` holds what all runs share.
"""


def run_schema() -> Node:
    """Return the JSON Schema of a run's file, with that of each of its sections."""
    run = deepcopy(schema_of(RunFile))
    known = run["$defs"]
    for kind in (Recipe, Runtime, Build, Evaluation, Gates, Dataset):
        _add(known, kind, kind.__name__)
    for part in ("Method", "Draft"):
        forms = []
        for name in methods.names():
            _add(known, getattr(methods.settings_of(name), part), f"{part} {name}")
            forms.append({"$ref": f"{REF}{part} {name}"})
        known["Recipe"]["properties"][part.lower()] = {"anyOf": forms}
    for name in ("Evaluation", "Gates", "Dataset"):  # keys beside those of other files
        known[name].pop("required", None)
    sections = {"recipe": "Recipe", "runtime": "Runtime", "build": "Build", "evaluation": "Evaluation", "gates": "Gates"}
    for holder in (run, known["StageFile"]):
        for key in sections.keys() & holder["properties"].keys():
            holder["properties"][key] = {"$ref": REF + sections[key], "description": holder["properties"][key]["description"]}
    source = known["Dataset"]["properties"]["source"]
    entry = {"anyOf": [*source["anyOf"], {"$ref": f"{REF}Dataset"}]}
    run["properties"]["data"]["additionalProperties"] = entry
    stages, own = run["properties"]["stages"], {"anyOf": [{"$ref": f"{REF}StageFile"}, {"type": "null"}]}
    names = {"type": "array", "items": {"type": "string"}}
    run["properties"]["stages"] = {
        "description": stages["description"],
        "title": stages["title"],
        "anyOf": [{"type": "object", "additionalProperties": own}, names],
    }
    return run | {"title": "A run of longspec"}


def _add(known: Node, kind: Any, name: str) -> None:
    """Put a type, and those that it refers to, among the known ones."""
    own = deepcopy(schema_of(kind))
    known.update(own.pop("$defs", {}))
    known[name] = own


def workflow_schema() -> Node:
    """Return the JSON Schema of config/workflow.yaml; a preset brings what an entry must have."""
    workflow = deepcopy(schema_of(WorkflowFile)) | {"title": "config/workflow.yaml of longspec"}
    workflow["$defs"]["Dataset"]["anyOf"] = [{"required": ["source", "shards"]}, {"required": ["preset"]}]
    del workflow["$defs"]["Dataset"]["required"]
    return workflow


def page() -> str:
    """Return the page of all keys, a table for each section."""
    run, workflow = run_schema(), schema_of(WorkflowFile)
    known = run["$defs"]
    parts = [HEAD, "## A run's file\n", *_table(run, run, "", {"recipe", "runtime", "build", "evaluation", "gates", "stages"})]
    parts += ["## A stage: stages.\\<name>.\n", *_table(known["StageFile"], run, "", {"recipe", "runtime"})]
    parts += ["## recipe: what decides the weights\n", *_table(known["Recipe"], run, "recipe.", {"method", "draft"})]
    for name in methods.names():
        parts += [f"## recipe of {name}\n"]
        rows = [list(_rows(known[f"{part} {name}"], run, f"recipe.{part.lower()}.", set())) for part in ("Method", "Draft")]
        parts += _lines([row for each in rows for row in each])
    parts += ["## runtime: how it is trained\n", *_table(known["Runtime"], run, "runtime.", set())]
    parts += ["## build: a target of our own\n", *_table(known["Build"], run, "build.", set())]
    parts += ["## config/workflow.yaml\n", *_table(workflow, workflow, "", {"data", "evaluation", "gates"})]
    parts += ["## data.\\<name>: a data set\n", *_table(known["Dataset"], run, "", {"regenerate"})]
    parts += ["## data.\\<name>.regenerate: answers by the target\n", *_table(known["Regenerate"], run, "", set())]
    parts += ["## evaluation: how drafts are measured\n", *_table(known["Evaluation"], run, "", {"tasks", "bench"})]
    parts += ["## evaluation.tasks.\\<name>: what they are measured on\n", *_table(known["TaskEntry"], run, "", set())]
    parts += ["## gates: how good a draft must be\n", *_table(known["Gates"], run, "", set())]
    return "\n".join(parts)


def _table(node: Node, whole: Node, prefix: str, closed: set[str]) -> list[str]:
    return _lines(list(_rows(node, whole, prefix, closed)))


def _lines(rows: list[tuple[str, ...]]) -> list[str]:
    """Return rows as a table of Markdown."""
    lines = ["| key | may be | default | it is |", "| --- | --- | --- | --- |"]
    return [*lines, *(f"| {' | '.join(cell.replace('<', ESCAPED) for cell in row)} |" for row in rows), ""]


def _rows(node: Node, whole: Node, prefix: str, closed: set[str]) -> Iterator[tuple[str, ...]]:
    """Yield key, what it may be, default and meaning of each key; a section's keys in its place. closed: those with a table."""
    for name, each in node.get("properties", {}).items():
        below = whole["$defs"].get(each.get("$ref", "").removeprefix(REF), {})
        if "properties" in below and name not in closed:
            yield from _rows(below, whole, f"{prefix}{name}.", closed)
            continue
        default = _default(each.get("default", "null" if {"type": "null"} in each.get("anyOf", []) else ""), name in closed)
        may_be = "a mapping" if name in closed and name != "stages" else allowed(each, whole)
        yield f"`{prefix}{name}`", may_be, default, each.get("description", "the section below" if name in closed else "")


def _default(value: Any, is_section: bool) -> str:
    if is_section or value in ({}, [], ""):
        return ""
    return f"`{value if isinstance(value, str) else shown(value)}`"


def texts() -> dict[str, str]:
    """Return the generated files by their paths from the repository's root."""
    schemas = {RUN: run_schema(), WORKFLOW: workflow_schema()}
    return {path: json.dumps(schema, indent=1, sort_keys=True) + "\n" for path, schema in schemas.items()} | {PAGE: page()}


def main(arguments: list[str] | None = None) -> int:
    """Write the files, or hold them against today's types."""
    parser = argparse.ArgumentParser(prog="python -m longspec.workflow.reference", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail where a file is not of today")
    options, root = parser.parse_args(arguments), CONFIG_DIR.parent
    if options.check:
        old = [path for path, text in texts().items() if not (root / path).is_file() or (root / path).read_text() != text]
        if old:
            print(f"{', '.join(old)}: not of today's types; type: python -m longspec.workflow.reference", file=sys.stderr)
        return bool(old)
    for path, text in texts().items():
        Path(root / path).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
