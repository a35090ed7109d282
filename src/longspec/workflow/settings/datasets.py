"""Check the datasets and tasks of config/workflow.yaml: declared, existing, and kept apart. Raises ValueError."""

from collections.abc import Iterable, Mapping
from itertools import islice, product
from pathlib import Path
from typing import Any

from longspec.config.faults import did_you_mean, faults_in
from longspec.config.run_file import Run
from longspec.data import hub
from longspec.data.align.fields import found, units_of
from longspec.data.raw import complete, is_hub, is_made
from longspec.data.read import source_files
from longspec.measure.prompt_files import read_records
from longspec.measure.tasks import Benchmark, Task

FILE = "config/workflow.yaml"
SHARD = 256 * 2**20  # bytes of text that one job tokenizes
MOST_SHARDS = 64
HELD_OUT = 0.05  # default of a data set for which a run's file gives only the source


def entries_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data sets of a run's file as entries of config/workflow.yaml; a text or a list is a source."""
    whole = {
        name: entry if isinstance(entry, dict) else {"source": entry, "held_out": HELD_OUT} for name, entry in data.items()
    }
    return {
        name: entry if "shards" in entry or "preset" in entry else entry | {"shards": _shards(entry.get("source"))}
        for name, entry in whole.items()
    }


def _shards(source: Any) -> int:
    """Return the number of parts to tokenize, by the files' size; 8 for the hub, whose files are not there yet."""
    if is_made(source) or (isinstance(source, str) and is_hub(source)):
        return 8 if is_hub(source) else 1
    try:
        size = sum(path.stat().st_size for path in source_files.files_of(source))
    except (ValueError, OSError, TypeError, AttributeError):
        return 1  # the source is refused later, with its key
    return min(MOST_SHARDS, 1 + size // SHARD)


def origins(source: str | list[str]) -> list[str]:
    """Return the origins of a source's records: the files themselves, or a repository of the hub as a whole."""
    if isinstance(source, str) and is_made(source):
        return ["stdlib" if source == "questions" else source]  # both are made from the same files, and held out by file
    if isinstance(source, str) and is_hub(source):
        return [hub.parse(source).repository]
    return [str(path.resolve()) for path in _files(source)]


def prompt_files(name: str, task: Benchmark, file: str = FILE) -> list[Path]:
    """Return the files of a task's prompts on this machine; [] for the hub, whose files are known once they are fetched.

    file: the file that declares the task. Raises ValueError if one does not exist.
    """
    try:
        return [] if is_hub(task.source) else _files(task.source)
    except ValueError as error:
        raise ValueError(f"{file}: evaluation.tasks.{name}.source: {error} (seen from {Path.cwd()})") from None


def _files(source: str | list[str]) -> list[Path]:
    """Return a source's files. Raises ValueError for a path that the workflow would change."""
    files = source_files.files_of(source)
    for path in map(str, files):
        if "{" in path or "}" in path:
            raise ValueError(f"{path}: has braces, which the workflow takes for a wildcard; rename the file")
    return files


def check_data(used: Mapping[str, str], data: Mapping[str, Any], runs: Iterable[Run] = ()) -> None:
    """Raise ValueError for a used dataset that is not declared, has a wrong setting, or whose files do not exist, and for one
    origin with two shares of held-out records: one dataset would train on what the other holds out.

    used: name -> the key that names it; runs: whose files may declare datasets too.
    """
    file_of = {name: run.file for run in runs for name in run.says.data}
    shares: dict[str, tuple[tuple[float, str], str]] = {}  # origin -> share, and the setting as text
    for name, key in used.items():
        file = file_of.get(name, FILE)
        if name not in data:
            raise ValueError(
                f"{key}: there is no dataset '{name}' under `data` in {FILE}; add it there ({name}: {{source: <file>.jsonl,"
                f" shards: <number>}}, or {{preset: <name in config/data.yaml>}}) or name another; {did_you_mean(name, data)}"
            )
        with faults_in(file):
            whole = complete(name, data[name])
            share = whole["held_out"], whole.get("held_out_by", "")
        try:
            made_of = origins(data[name]["source"])
        except ValueError as error:
            raise ValueError(f"{file}: data.{name}.source: {error} (seen from {Path.cwd()})") from None
        told = f"data.{name}.held_out: {share[0]}" + ("" if "held_out" in data[name] else " (the default)")
        told += f" by {share[1]}" if share[1] else ""
        for origin in made_of:
            wanted, other = shares.setdefault(origin, (share, told))
            if share != wanted:
                raise ValueError(
                    f"{file}: {told}, but {other}, and both are made from '{origin}': a record held out in one"
                    f" would be trained on in the other; give both the same held_out and held_out_by"
                )


def check_task_files(tasks: Mapping[str, Task], trained: Iterable[str], data: Mapping[str, Any], file: str) -> None:
    """Raise ValueError for prompts that are trained on: they would measure no new text. file: the file that declares the tasks.

    A task of the hub must come from another repository than the trained data, or both must name different parts of it.
    """
    sources = {name: data[name]["source"] for name in trained}
    trained_on = {origin: name for name, source in sources.items() for origin in origins(source)}
    for name, task in tasks.items():
        if not isinstance(task, Benchmark):
            continue
        key = f"{file}: evaluation.tasks.{name}.source"
        for path in prompt_files(name, task, file):
            dataset = trained_on.get(str(path.resolve()))
            if dataset is not None:
                raise ValueError(
                    f"{key}: {path} is trained on, as data.{dataset};"
                    f" give other prompts, or its held-out records: {name}: {{data: {dataset}, context: [64, 1024]}}"
                )
        for dataset, source in sources.items() if is_hub(task.source) else ():
            if is_hub(source) and _overlap(hub.parse(str(task.source)), hub.parse(source)):
                raise ValueError(
                    f"{key}: {task.source} is trained on, as data.{dataset} ({source}); give another split or file of the"
                    f" repository, for both, or other prompts"
                )


def _overlap(one: hub.Source, other: hub.Source) -> bool:
    """Tell whether two parts of the hub may share records."""
    parts = [(each.parts, each.file) for each in (one, other)]
    return one.repository == other.repository and (((), "") in parts or parts[0] == parts[1])


def check_prompts(tasks: Mapping[str, Task], file: str) -> None:
    """Raise ValueError if the first record of a task's file lacks a field of its template. This opens the files."""
    for name, task in tasks.items():
        if not isinstance(task, Benchmark):
            continue
        for path in prompt_files(name, task, file):
            for (place, record), field in product(islice(read_records(path, task.member), 1), units_of(task.template)):
                if found(record, field) is None:
                    raise ValueError(
                        f"{file}: evaluation.tasks.{name}.template: asks for {{{field}}}, which is missing or null in {place}; "
                        f"its fields: {', '.join(record)}"
                    )
