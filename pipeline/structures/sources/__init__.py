"""Data sources: users' tables and folders become a stream of items and rejections, before any structure is read."""
