"""What does a worker lend, from which directory, and to which process?

A rank's plan and a device come in; memory that other processes map goes out, with the handles to map it. Pages are lent
to one process at a time, until that process has exited.

holdings  pages, stamp table and staging buffer of one rank, allocated by the worker or mapped by an engine
rundir    the worker's private directory: lock, token, socket
writer    the process that has the pages, watched by a pidfd
"""
