"""Comparison with the reference in one run: the cost of a step for the engine here, and in vLLM's own manager.

work        what both sides do: prompts, sampled tokens, chunks; standard library only
models      the four models, as headers (for the reference) and as ReplicaSpecs (for us)
engine      our side: an engine on a Session, its measured intervals
reference   the other side, in an environment of its own: vLLM's KVCacheManager, its measured intervals
places      where a session can lead: in process, over a Unix socket, over TCP loopback
start       one process start: every case, its sides interleaved round by round
report      medians, spreads and ratios; the table
history     the ratios of each measured commit, and a chart
"""
