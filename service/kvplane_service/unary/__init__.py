"""Unary calls: one operation of a step each, with request names in place of slots.

calls        the calls and their answers as values
service      applies a call once, through the replica's host; `UnaryCalls.do` is the entry point
fields       names of columns to names of the call's fields, for refusals
requests     request names to slots
hashing      token ids to block hashes, beside the event loop when long
idempotency  stored answers by op_id: a repeated call changes nothing
"""
