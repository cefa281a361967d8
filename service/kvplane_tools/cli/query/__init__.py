"""Commands that query a running service over gRPC: each makes one or a few calls and prints the answer as a table, as
JSON or as YAML.
"""
