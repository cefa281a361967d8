"""Commands that run engines on a virtual clock (`kvplane replay`, `kvplane demo`): engines in threads, a progress view,
and a report at the end. Without `--service` they start a service of their own (`cli.child`).
"""
