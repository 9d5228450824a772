"""The bytes of structure files to one table of atoms."""
