"""The published import path of Qwen3Glide."""

from longspec.methods.glide.trainer import Qwen3Glide as Qwen3Glide
