"""Unary calls: one operation of a step each, on requests by name.

A call comes in as a value with token ids or hashes; the encoded answer goes out, and is kept for retries by op_id.

calls        the calls and their answers as values
service      applies a call once, through the replica's host; `UnaryCalls.do` is the entry point
fields       names of columns to names of the call's fields, for refusals
requests     request names to slots (numbers of requests in steps)
hashing      token ids to block hashes, on a thread when long
asking       calls that an engine carries out; stored answers by op_id: a repeated call changes nothing
"""
