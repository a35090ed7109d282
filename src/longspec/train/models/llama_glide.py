"""The published import path of LlamaGlide."""

from longspec.methods.glide.trainer import LlamaGlide as LlamaGlide
