"""Tiny targets with random weights."""

from tests.random_targets import any_target_path, seeded, target_path

__all__ = ["any_target_path", "seeded", "target_path"]
