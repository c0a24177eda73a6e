"""Native code of ranks: rendezvous, copies, exchanges, reductions."""
