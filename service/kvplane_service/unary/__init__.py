"""Unary calls: one operation of a step each, with request names in place of slots.

service      the operations, applied through the replica's host
requests     request names to slots
hashing      token ids to block hashes, beside the event loop when long
idempotency  stored answers by op_id: a repeated call changes nothing
"""
