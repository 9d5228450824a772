"""Turns records into text, charts and HTML; imports no executor."""
