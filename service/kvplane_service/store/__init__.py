"""The durable side: where published entries and registrations outlive the process.

    StepResult -> ReplicaJournal (what changed) -> StoreWriter (beside the event loop) -> IndexStore
    IndexStore -> load_replicas -> Registry (recovering) -> a session that shows its stamps -> Replica.recover
"""
