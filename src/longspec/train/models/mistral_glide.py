"""The published import path of MistralGlide."""

from longspec.methods.glide.trainer import MistralGlide as MistralGlide
