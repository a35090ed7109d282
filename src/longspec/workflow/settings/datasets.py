"""The datasets and tasks of config/workflow.yaml: that they are declared, there, and kept apart. Raises ValueError."""

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
SHARD = 256 * 2**20  # bytes of text in a job that tokenizes
MOST_SHARDS = 64
HELD_OUT = 0.05  # of a data set of which a run's file says its source alone


def entries_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data sets of a run's file as entries of config/workflow.yaml: a text or a list is a source."""
    whole = {
        name: entry if isinstance(entry, dict) else {"source": entry, "held_out": HELD_OUT} for name, entry in data.items()
    }
    return {
        name: entry if "shards" in entry or "preset" in entry else entry | {"shards": _shards(entry.get("source"))}
        for name, entry in whole.items()
    }


def _shards(source: Any) -> int:
    """Return in how many parts files are tokenized, by their size; of the hub's, which are not there yet, eight."""
    if is_made(source) or (isinstance(source, str) and is_hub(source)):
        return 8 if is_hub(source) else 1
    try:
        size = sum(path.stat().st_size for path in source_files.files_of(source))
    except (ValueError, OSError, TypeError, AttributeError):
        return 1  # the source is refused later, with its key
    return min(MOST_SHARDS, 1 + size // SHARD)


def origins(source: str | list[str]) -> list[str]:
    """Return where a source's records come from: the files themselves, or a repository of the hub as a whole."""
    if isinstance(source, str) and is_made(source):
        return ["stdlib" if source == "questions" else source]  # both are made of the same files, and held out by them
    if isinstance(source, str) and is_hub(source):
        return [hub.parse(source).repository]
    return [str(path.resolve()) for path in _files(source)]


def prompt_files(name: str, task: Benchmark, file: str = FILE) -> list[Path]:
    """Return the files of a task's prompts on this machine; none for those of the hub, which are known once they are fetched.

    file: where the task stands. Raises ValueError when one is not there.
    """
    try:
        return [] if is_hub(task.source) else _files(task.source)
    except ValueError as error:
        raise ValueError(f"{file}: evaluation.tasks.{name}.source: {error} (seen from {Path.cwd()})") from None


def _files(source: str | list[str]) -> list[Path]:
    """Return a source's files. Raises ValueError for a path that would not come through the workflow as it is."""
    files = source_files.files_of(source)
    for path in map(str, files):
        if "{" in path or "}" in path:
            raise ValueError(f"{path}: has braces, which the workflow takes for a wildcard; rename the file")
    return files


def check_data(used: Mapping[str, str], data: Mapping[str, Any], runs: Iterable[Run] = ()) -> None:
    """Raise ValueError for a dataset in use that is not declared, has a wrong setting, or whose files are not there, and for
    one origin with two shares of held-out records: a dataset would train on what another holds out.

    used: name -> the key that names it; runs: whose files may declare datasets too.
    """
    file_of = {name: run.file for run in runs for name in run.says.data}
    shares: dict[str, tuple[tuple[float, str], str]] = {}  # by origin
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
    """Raise ValueError for prompts that are trained on: they would measure no new text. file: where the tasks stand.

    A task of the hub is of another repository than what is trained on, or both name their part of it, and not the same.
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
    """Raise ValueError when the first record of a task's file has not the fields of its template. It opens the files."""
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
