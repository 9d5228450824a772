"""Bytes on disk: a record, a shard of records, the names of files, publishing whole or not at all."""
