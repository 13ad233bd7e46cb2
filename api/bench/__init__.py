"""`tokensplice bench`: what a turn costs against the length of its conversation, on this machine.

    scale.py       how much is played, and where it is looked at
    talk.py        the load: conversations that grow by equal turns, and their request bodies
    deployment.py  the processes: Redis, zero-latency engine, one worker, pass-through floor
    floor.py       the floor: moves a turn's bytes and does nothing else
    probes.py      counters read from outside: CPU clocks, Redis, /metrics, the machine
    measure.py     plays the load and collects
    figures.py     what was collected -> figures; pure
    report.py      figures -> tables and a plot
    run.py         all of it, for a command line

Machines are noisy, so no figure is a latency: CPU time, counts, bytes, and ratios within one run.
"""
