"""The kvplane service: a pure allocator core and the shell that serves it."""
