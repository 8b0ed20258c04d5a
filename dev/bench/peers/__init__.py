"""Other engines that run the same two rules, each a program of its own."""

# Behind the watermark a window must still be whole: 10 s out-of-orderness and 1 h allowed lateness, in microseconds.
GRACE_US = 10_000_000 + 3_600_000_000
