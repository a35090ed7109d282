"""A draft folder in the layout of another program."""

from pathlib import Path

from safetensors.torch import save_file

from longspec import methods
from longspec.atomic_files import files_below, new_folder, write_json
from longspec.methods.draft_files import CONFIG, METHOD, SAFETENSORS, read_draft_config


def export_draft(folder: Path, layout: str, out: Path) -> list[str]:
    """Write a draft folder to `out` in a layout that its method has, whole or not at all; the names of the files.

    Raises ValueError where `out` is there, the folder is no draft's, its method has no such layout, or its files are damaged.
    """
    if out.exists():
        raise ValueError(f"--out: {out}: is there already; give another name, or remove it")
    found = read_draft_config(folder) if folder.is_dir() else None
    if found is None:
        raise ValueError(f"{folder}: not a draft folder: has no {CONFIG} with the field {METHOD}")
    file, content = found
    layouts = methods.layouts_of(content[METHOD])
    if layout not in layouts:
        told = f"it has {', '.join(layouts)}" if layouts else "it has none"
        raise ValueError(f"--layout: {layout}: {file}: {METHOD}: drafts of {content[METHOD]!r} have no such layout; {told}")
    tensors, config = methods.layout_of(content[METHOD], layout).exported(folder)
    with new_folder(out) as beside:
        save_file(tensors, beside / SAFETENSORS, metadata={"format": "pt"})
        write_json(beside / CONFIG, config)
    return files_below(out)
