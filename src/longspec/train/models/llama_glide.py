"""The published import path of LlamaGlide."""

from longspec.methods.glide.families import LlamaGlide

__all__ = ["LlamaGlide"]
