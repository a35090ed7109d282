"""Load target and draft from a target's path; the class follows from the target's config.json."""

from typing import Any

from longspec import methods
from longspec.families import check_target
from longspec.methods.draft_files import target_and_draft
from longspec.methods.glide.trainer import Glide, class_for
from longspec.models.target_config import read_target_config


def attach(target_model_path: str, glide_path: str | None = None, **arguments: Any) -> Glide:
    """Return the target of a folder or hub name with its draft, from a draft folder or weight file, or a fresh one.

    If target_model_path is a draft folder, the target that it names is loaded. arguments: of the class's constructor. Raises
    ValueError if the target is not supported or the draft was made for another one.
    """
    target_model_path, glide_path = target_and_draft(target_model_path, glide_path)
    config = read_target_config(target_model_path)
    check_target(config, f"{target_model_path}/config.json")
    methods.check_drafts_for("glide", config.model_type, f"{target_model_path}/config.json")
    return class_for(config.model_type)(config, target_model_path, glide_path, **arguments)
