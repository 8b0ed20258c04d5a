"""What the command line runs, by what it is about; all that needs Spark imports it when it runs."""
