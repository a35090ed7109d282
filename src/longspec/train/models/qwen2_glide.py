"""The published import path of Qwen2Glide."""

from longspec.methods.glide.trainer import Qwen2Glide as Qwen2Glide
