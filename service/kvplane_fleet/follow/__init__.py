"""Follows the event streams of engines: the order of batches without I/O (`order`), and the sockets (`zmq_source`)."""
