"""FlashInfer's attention behind the interface of `kvplane_worker.ops`, where it is installed; `entry` is what selection
sees. Everything that is not attention, and attention that it does not take, is another backend's.
"""
