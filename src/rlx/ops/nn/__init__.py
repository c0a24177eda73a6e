"""Layers of networks: convolutions, norms, attention, recurrent cells, resampling, losses."""
