"""What a worker lends: memory that an engine on the same host maps, to one process at a time, until that process exits.

holdings  pages, stamp table and staging buffer of one rank, allocated by the worker or mapped by an engine
rundir    the worker's private directory: lock, token, socket
writer    the process to which the pages are lent, watched by a pidfd
"""
