"""The published import path of Qwen3Glide."""

from longspec.methods.glide.families import Qwen3Glide

__all__ = ["Qwen3Glide"]
