"""The published import path of Qwen2Glide."""

from longspec.methods.glide.families import Qwen2Glide

__all__ = ["Qwen2Glide"]
