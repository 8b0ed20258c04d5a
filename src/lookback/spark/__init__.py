"""The shell: moves rows between Delta tables and the core. Holds no detection logic."""
