"""The GPU worker of kvplane: page buffers, kernels and transfers."""
