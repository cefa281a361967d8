"""Types of the compiled module; _native.cpp is its source. `form`: 0 kvplane, 1 vLLM's pickle, 2 canonical CBOR."""

ACCELERATED: bool
MAX_BLOCK: int

def hash_run(form: int, parent: bytes, packed: bytes, block_size: int, portable: bool = False, /) -> bytes: ...
def unpack_varints(packed: bytes | memoryview, /) -> bytes: ...
