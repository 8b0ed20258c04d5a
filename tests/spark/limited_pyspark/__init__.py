"""Python workers of Spark that have as little memory as those of serverless compute."""
