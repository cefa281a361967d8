"""Tiers: places outside the device (host memory, disk) where blocks with a key are saved before they are evicted.

    device ──save──▶ host ──move──▶ disk          what is next to be evicted is copied to the next tier just before
    device ◀──load── host, disk                   an admission with LOAD loads what its hit lacks on the device

The core decides, and orders the work as *jobs* in `Orders`; movers do it, and the engine reports the end of each job. A
slot of a tier has a *version*, the job that wrote it, which no other content ever has.

    tier        the slots of one tier, and which key each has
    tiers       all tiers of a replica, the jobs in flight, and the union of device and tiers as an index for look-ups
    loads       begins and ends the loads of admitted requests
    prefetch    copies into the first tier what requests will need that are not admitted yet
    wanted      what a tier wants earlier than that
    behind      chooses what to save and to move at the end of a step
    rows        the blocks of a prefix that a hit needs
    entries     the exported state of the tiers
    invariants  checks them
"""
