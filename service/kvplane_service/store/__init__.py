"""Store registrations and published cache keys, so that both survive the process. A key is the hash under which a block
is found; it is published once its block is computed on all ranks.

An entry is the stored state of a block: the key, and the stamp of the block's page. A chunk is a stored batch of
entries. Steps come in; chunks and one record per replica go to an IndexStore. After a restart the way is reversed:

    StepResult -> ReplicaJournal (changed blocks) -> StoreWriter (background) -> IndexStore
    IndexStore -> Keeper -> Registry (recovering replicas) -> a session with its stamps -> Replica
"""
