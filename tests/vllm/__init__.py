"""A real vLLM 0.33.0 on a CPU, unmodified, with kvplane's scheduler: `make test-vllm`."""
