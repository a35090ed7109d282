"""GLIDE drafts in vLLM, a plugin of the group `vllm.general_plugins`. It imports nothing of longspec."""

ARCHITECTURE = "GlideForCausalLM"
TESTED = ("0.32.0",)  # of vLLM


def register() -> None:
    """Register the architecture with vLLM, which calls this in each of its processes.

    On CPUs, also repair sampling with a draft, for a tested version (cpu_sampling.py).
    """
    import vllm
    from vllm import ModelRegistry
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, f"longspec_vllm.glide:{ARCHITECTURE}")
    if not current_platform.is_cpu():
        return
    if is_tested():
        from longspec_vllm import cpu_sampling

        cpu_sampling.repair()
    else:
        init_logger(f"vllm.{__name__}").warning(
            "longspec-vllm: vLLM %s is left as it is: sampling beside a draft on a CPU gives another distribution, "
            "unless vLLM has mended that since %s",
            vllm.__version__,
            TESTED[-1],
        )


def is_tested() -> bool:
    """Tell whether this version of vLLM is one of TESTED."""
    import vllm

    return vllm.__version__.split("+")[0] in TESTED
