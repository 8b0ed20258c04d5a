"""Other engines that run the same two rules, each a program of its own."""
