"""What is cached where, over many engines: follows their cache events, and computes what a prompt would hit in each.

    sockets ─▶ follow ─▶ wire ─▶ index ─▶ hits

The allocation service does not know it.
"""
