"""`moepdl plan`: an expert-parallel block in time, simulated over any number of ranks, and what is chosen by that.

routing    how often each expert is chosen, and on how many ranks a token's experts live
links      what a link and a transport take: the table of measured values
traffic    rows that each rank sends, receives and computes; equal ranks become one class
block      the block's operations in order: the compiler's launches with the exchanges between them
simulate   those operations in time
choose     every transport, order and number of chunks simulated, and the fastest
command    the command line;  text: its lines;  trace: its timeline
"""
