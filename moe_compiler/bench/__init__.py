"""`moepdl bench block`: one MoE block on this device, with its floor, against eager, Inductor and peers.

shapes    sizes and rules of the blocks of known models
routers   their routers;  block: the whole block as plain PyTorch, in the spellings that models use
exact     the same in float64, and what counts as right
floor     what the device needs at least
ways      what is compared: moepdl, eager, Inductor, peers (peers.py: what a peer's file gets and gives)
timed     times of calls and of CUDA graphs, in turns; memory
measuring one row a measurement
results   JSON and Markdown;  plot: the picture
command   the command line
"""
