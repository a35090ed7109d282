"""Write a draft folder in another program's layout. No torch, if the program reads the weights as they are."""

import shutil
from pathlib import Path

from longspec import methods
from longspec.atomic_files import files_below, new_folder, write_json
from longspec.distributed import log
from longspec.methods.draft_files import CONFIG, METHOD, SAFETENSORS, draft_weights_file, read_draft_config


def write_layout(
    folder: Path, layout: str, out: Path | None = None, dtype: str | None = None, context: int | None = None
) -> None:
    """Write a draft folder in a layout of its method.

    out: None: a folder named after the layout, inside the draft's folder; only for layouts that keep the draft's weights.
    dtype: of rewritten weights, None: the layout's choice; context: tokens of the longest text, None: no limit. Raises
    ValueError for a folder without a draft, an unknown layout, a damaged file, an existing `out`, and as the layout does.
    """
    if out is not None and out.exists():
        raise ValueError(f"--out: {out}: is there already; give another name, or remove it")
    found = read_draft_config(folder) if folder.is_dir() else None
    if found is None:
        raise ValueError(f"{folder}: not a draft folder: has no {CONFIG} with the field {METHOD}")
    file, content = found
    layouts = methods.layouts_of(content[METHOD])
    if layout not in layouts:
        known = f"it has {', '.join(layouts)}" if layouts else "it has none"
        raise ValueError(f"--layout: {layout}: {file}: {METHOD}: drafts of {content[METHOD]!r} have no such layout; {known}")
    if hasattr(layouts[layout], "write"):
        if out is None:
            raise ValueError(f"--out: missing; the layout {layout} has weights of its own: name what to write")
        layouts[layout].write(folder, out, dtype, context)
        log(f"{out}: written")
        return
    for option, value in (("--dtype", dtype), ("--context", context)):
        if value is not None:
            raise ValueError(f"{option}: {value}: the layout {layout} has the draft's own; leave it out")
    if draft_weights_file(folder).name != SAFETENSORS:
        raise ValueError(f"{folder / SAFETENSORS}: missing; the layout {layout} reads no other file of weights")
    place = out or folder / layout
    with new_folder(place) as beside:
        write_json(beside / CONFIG, layouts[layout].exported(folder))
        if place.absolute().parent == folder.absolute():
            (beside / SAFETENSORS).symlink_to(Path("..", SAFETENSORS))
        else:  # a link would break when either is moved
            shutil.copy(folder / SAFETENSORS, beside / SAFETENSORS)
    log(f"{place}: {', '.join(files_below(place))}")
