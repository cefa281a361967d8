"""The kernels themselves: functions that Triton compiles, one file per family, called through `Launch` only.

Parameters without an annotation are pointers and numbers known at launch, `tl.constexpr` ones are compiled in. In the
interpreter numpy plays the device; it computes bfloat16 and float8 wrongly without a word, so there (`UPCAST`) values
become float32 first and 8-bit values go through the integer codec.
"""
