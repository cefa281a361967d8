"""KV tiers for vLLM: host memory and disk behind the device, by vLLM's interface for KV connectors (see the README).

settings  the options of the connector, and the engines that it refuses by name
messages  what the scheduler's half and the workers' half send each other
layout    the pages of vLLM as bytes by block, and the pages in host memory
planner   the scheduler's half: an allocator of kvplane whose device is the host memory
host      the allocator's steps, and the jobs of the disk
copier    copies between the pages of vLLM and those in host memory, behind each other on a thread
disk      the disk of a rank, with the movers of kvplane_worker
kept      the keys of the disk, for the next start of the engine
rank      the workers' half: carries out the orders of a step, and says what has ended
"""
