"""Fourier transforms, spectra, mel filters."""
