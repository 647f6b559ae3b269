"""Order of the (token, expert) pairs by expert."""
