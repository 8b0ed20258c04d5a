"""The commands of the command line, by subject. Commands that need Spark import it when they run."""
