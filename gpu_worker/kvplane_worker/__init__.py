"""The GPU worker of kvplane: page buffers, kernels and transfers live here. It holds no code yet."""
