"""Kernels measured on one GPU, each figure as a part of a limit that is measured in the same run."""
