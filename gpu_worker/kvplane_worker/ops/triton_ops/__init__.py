"""The fast backend: kernels in Triton behind the interface of `kvplane_worker.ops`. `entry` is what selection sees."""
