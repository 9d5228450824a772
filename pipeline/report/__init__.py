"""Records in, text for people out; knows no executor."""
