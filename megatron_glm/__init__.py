"""megatron_glm: an explicit-parallelism trainer for the GLM-5 family."""
