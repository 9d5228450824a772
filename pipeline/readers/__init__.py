"""Readers of files whose items are not structures: spectra and pairs, as named by `data.reader`."""
