"""The published import path of MistralGlide."""

from longspec.methods.glide.families import MistralGlide

__all__ = ["MistralGlide"]
