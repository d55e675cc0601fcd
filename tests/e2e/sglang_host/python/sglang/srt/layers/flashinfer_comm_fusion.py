"""The gate before the fused all-reduce: which GPUs get the kernel. A patch of this file is what a campaign tries."""

SUPPORTED_ARCHITECTURES = (9, 10)


def is_supported(capability: tuple[int, int]) -> bool:
    """Whether a GPU of this compute capability gets the fused kernel."""
    return capability[0] in SUPPORTED_ARCHITECTURES
