"""The kernels: functions that Triton compiles, one file per family. They are called only through `Launch`.

Parameters without annotation are run-time pointers and numbers; `tl.constexpr` parameters are compile-time constants.
Triton's interpreter runs kernels with numpy, which computes bfloat16 and float8 incorrectly without an error. There
(`UPCAST`) values are converted to float32 first, and 8-bit values by integer arithmetic.
"""
