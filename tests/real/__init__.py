"""Nightly tests on real weights, structures, spectra and scripts, all from public packages."""
