"""What people run: the command line, replays of workloads, the demo and the benchmark. Nothing imports this package.

cli       the commands of `kvplane`
replay    workloads through a service, without a model
"""
