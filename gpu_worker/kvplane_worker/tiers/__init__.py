"""The tiers of a worker: blocks of one rank outside its pages, and the threads that move them.

seal    what a slot says that it holds, with a checksum
slots   the slots of a tier, and those in host memory
arena   the memory of the slots in host memory, which peers map
disk    the slots in a file
peers   the slots of other replicas, which are only read
kept    what a file holds over restarts of its worker
movers  the threads that carry out the jobs of the job table (`kvplane.base.job_table`)
start   allocates the tiers of a replica and starts their movers
"""

from kvplane_worker.tiers.disk import DiskSlots as DiskSlots
from kvplane_worker.tiers.movers import MoverMemory as MoverMemory
from kvplane_worker.tiers.movers import Movers as Movers
from kvplane_worker.tiers.peers import Peer as Peer
from kvplane_worker.tiers.peers import PeerSlots as PeerSlots
from kvplane_worker.tiers.slots import HostSlots as HostSlots
from kvplane_worker.tiers.slots import Slots as Slots
from kvplane_worker.tiers.slots import use_of as use_of
from kvplane_worker.tiers.start import TierOptions as TierOptions
from kvplane_worker.tiers.start import start_movers as start_movers
