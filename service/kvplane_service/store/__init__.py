"""Stores registrations and published entries, so that they survive the process. Decisions go in; records and chunks
of an IndexStore come out; after a restart the reverse:

    StepResult -> ReplicaJournal (changed blocks) -> StoreWriter (background) -> IndexStore
    IndexStore -> Keeper -> Registry (recovering replicas) -> a session with its stamps -> Replica
"""
