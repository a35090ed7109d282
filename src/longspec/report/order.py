"""The order in which a variant's stages were trained, proven by hashes: each starts from the draft of the one before."""

from pathlib import Path

from longspec.atomic_files import sha256_file


def stage_order(folder: Path, started_from: dict[str, str | None]) -> list[str]:
    """The stages, each given with its initial weights' SHA-256, from first to last.

    Raises ValueError with file and field when they form no single chain.
    """
    names = list(started_from)
    drafts: dict[str | None, str] = {sha256_file(folder / name / "draft" / "model.safetensors"): name for name in names}
    after: dict[str | None, list[str]] = {}
    for name, weights in started_from.items():
        after.setdefault(drafts.get(weights), []).append(name)
    ordered: list[str] = []
    before: str | None = None
    while len(after.get(before, [])) == 1 and len(ordered) < len(names):
        before = after[before][0]
        ordered.append(before)
    if len(ordered) < len(names):
        left = next(name for name in names if name not in ordered)
        raise ValueError(
            f"{folder / left / 'checkpoint.json'}: identity.init_weights: the stages {', '.join(names)} form no chain in"
            " which each starts from the draft of the one before; train them again (rule train)"
        )
    return ordered
