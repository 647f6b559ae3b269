"""One spelling of an MoE block a file. `registry` lists them in the order they are tried."""
