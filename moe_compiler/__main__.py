"""`python -m moe_compiler` is the command `moepdl`."""

import sys

from moe_compiler.cli import main

if __name__ == "__main__":
    sys.exit(main())
