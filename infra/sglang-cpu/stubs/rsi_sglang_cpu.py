"""SGLang's own plugin entry point, loaded in each of its processes: deterministic inference without a GPU.

Seeds and the log-softmax path are then the real ones; batch invariance is not, for its kernels are Triton's.
"""


def register() -> None:
    import sglang.srt.arg_groups.choices as choices
    import sglang.srt.batch_invariant_ops as batch_invariant

    if "torch_native" not in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    batch_invariant.enable_batch_invariant_mode = lambda *args, **kwargs: None
