"""The pure part of Lookback: no Spark, no files, no clock. Time is an argument, aware UTC."""
