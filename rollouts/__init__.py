"""The domain without processes: episodes, traces, hints, alignment, packing, windows."""
