"""Looking at installations and runs: doctor, statistics of casts, NaN checks, logs read back, plots, reports."""
