"""Files of spectra by their forms, MGF, MSP and mzML: where each spectrum stands, and what it says."""
