"""What a training run did: its log read back, and plotted."""
