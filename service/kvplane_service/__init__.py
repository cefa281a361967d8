"""The kvplane service: an allocator core without I/O, and the packages that serve it over gRPC."""
