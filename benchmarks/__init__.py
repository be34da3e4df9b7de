# SPDX-License-Identifier: Apache-2.0
"""What awaiting a colocated call costs, beside the other ways to do it.

``python -m benchmarks`` runs everything and prints one table; ``python -m benchmarks --help`` lists
the options. Every benchmark measures its peers in the same processes as aiocolocated, one
repetition of each in turn (A B C A B C ...), because only numbers of one run on one machine can be
compared. The number of one process is the median of its repetitions; the table shows the median
over the processes.
"""
