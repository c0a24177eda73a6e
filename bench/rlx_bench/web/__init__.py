"""Exports to WebAssembly, measured in Node and in a headless Chromium."""
