"""Transports: threads, processes of one machine, MPI."""
