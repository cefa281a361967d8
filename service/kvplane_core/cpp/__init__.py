"""The compiled core: its C++ files, and the library `_native` that is made of them."""
