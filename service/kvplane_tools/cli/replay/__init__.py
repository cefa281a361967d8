"""The commands `kvplane replay` and `kvplane demo`: they run engines in threads on a virtual clock, show the progress,
and print a report at the end. Without `--service` they start a service in a child process (`cli.child`).
"""
