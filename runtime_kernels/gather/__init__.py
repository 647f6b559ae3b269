"""The row of each (token, expert) pair, put where its expert reads it."""
