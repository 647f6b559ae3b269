"""What programmatic dependent launch promises on this GPU, what it gains our chains, and where it does harm.

    python -m benchmarks.pdl_probes                      # on one GPU; writes docs/benchmarks/pdl*.json and .md
    python -m benchmarks.pdl_probes --only races edges   # some of the tables

Each probe decides something that the compiler does; docs/pdl.md says what.

| module | probes | table |
|---|---|---|
| races | P2-P5: whoever does not wait for a late producer is caught; stale values of all read | pdl |
| edges | P6: which edges of a captured graph are programmatic when something stands in between | pdl_edges |
| progress | P7: what early dependents do to a second stream, and to a producer that waits for it | pdl_progress |
| remainder | P8, P9: user kernels and Inductor's own attribute beside our chains | pdl_inductor, pdl_inductor_gain |
| gluon | P10: does a Gluon kernel keep its wait and trigger, and does the audit see them | pdl_gluon |
| gain | P1: a boundary of tiny kernels; our chains against their twins without the attribute | pdl_boundary, pdl_gain |

Every spin of a kernel is bounded by a time and by a number of turns, and the host gives up after a while (`wait_for`).
"""
