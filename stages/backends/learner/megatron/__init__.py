"""The learner on Megatron-core: the same protocol under tensor, pipeline, context, expert and data parallelism.

Import `learner` (rank 0 and its followers). On a machine without CUDA the same code runs on gloo through `cpu_shim`.
"""
