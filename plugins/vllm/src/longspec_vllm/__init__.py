"""GLIDE drafts in vLLM, a plugin of the group `vllm.general_plugins`. It imports nothing of longspec."""

ARCHITECTURE = "GlideForCausalLM"
TESTED = ("0.32.0",)  # versions of vLLM


def register() -> None:
    """Make the architecture known to vLLM, which calls this in each of its processes.

    On CPUs also repair vLLM's sampling beside a draft (cpu_sampling.py).
    """
    from vllm import ModelRegistry
    from vllm.platforms import current_platform

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, f"longspec_vllm.glide:{ARCHITECTURE}")
    if current_platform.is_cpu():
        from longspec_vllm import cpu_sampling

        cpu_sampling.repair()
