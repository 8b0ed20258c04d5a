"""The commands of the command line, by subject. A command that needs Spark imports it when it runs."""
