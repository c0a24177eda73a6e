"""What users call: options, compile, load, jit and transforms, and the stages behind them."""
