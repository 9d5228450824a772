"""What images and their texts are read with: decoding, byte pairs, tars, names of classes, and made ones."""
